"""`hpcdist horovod`: the command that builds it."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated

import typer

from hpcdist.tools import console
from hpcdist.tools.cli.base import whole_number
from hpcdist.tools.options import Launcher, flag, option

app = typer.Typer(rich_markup_mode=None)


@app.callback()
def _group() -> None:
    pass  # typer makes no group of an app with one command


class Gpu(str, enum.Enum):
    auto = "auto"
    nccl = "nccl"
    off = "off"


@app.command()
def build(
    gpu: Annotated[Gpu, typer.Option(help="Sums on GPUs by NCCL. auto: if CUDA and NCCL are there.")] = Gpu.auto,
    install: Annotated[bool, typer.Option(help="Install the wheel into this environment.")] = True,
    rebuild: Annotated[bool, flag("--rebuild", "Build again, even if the cache has a wheel.")] = False,
    source: Annotated[Path | None, option("FILE", "Source package of Horovod, for machines without network.")] = None,
    cache: Annotated[Path | None, option("FOLDER", "Folder that keeps wheels. Default: in ~/.cache.")] = None,
    mpicxx: Annotated[str | None, option("PROGRAM", "MPI compiler.")] = None,
    cxx: Annotated[str | None, option("PROGRAM", "C++ compiler.")] = None,
    cuda_home: Annotated[Path | None, option("FOLDER", "Folder that has bin/nvcc.")] = None,
    nccl_home: Annotated[Path | None, option("FOLDER", "Folder that has include/nccl.h.")] = None,
    launcher: Launcher = None,
    jobs: Annotated[int | None, whole_number("Compilers at the same time. Default: by cores and memory.")] = None,
) -> None:
    """Build Horovod for this environment's torch and MPI (minutes), test it on 2 ranks, and install it.

    A cache keeps the wheel: it is built again only for another torch, MPI, Python, CUDA or compiler.

    Example: hpcdist horovod build --gpu off
    """
    from contrib.horovod.build import default_folder, run
    from contrib.horovod.toolset import BuildOptions

    options = BuildOptions(
        (cache or default_folder()).absolute(),
        install=install,
        rebuild=rebuild,
        source=source,
        launcher=launcher,
        jobs=jobs,
        gpu=gpu.value,
        cxx=cxx,
        mpicxx=mpicxx,
        cuda_home=cuda_home,
        nccl_home=nccl_home,
    )
    console.facts(run(options, os.environ))
