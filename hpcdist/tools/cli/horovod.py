"""`hpcdist horovod`: the command that builds it."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated

import typer

from hpcdist.tools import console

app = typer.Typer(name="horovod", no_args_is_help=True, help="Horovod, for strategy.provider=horovod.")


class Gpu(str, enum.Enum):
    auto = "auto"
    nccl = "nccl"
    off = "off"


@app.command()
def build(
    gpu: Annotated[Gpu, typer.Option(help="GPU operations by NCCL; auto: where all of it is there.")] = Gpu.auto,
    install: Annotated[bool, typer.Option(help="Install the wheel into this environment.")] = True,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Build anew, whatever the cache holds.")] = False,
    source: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Horovod's source package, for machines without an index.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where wheels are kept; by default in ~/.cache.")
    ] = None,
    mpicxx: Annotated[str | None, typer.Option(metavar="PROGRAM", help="The MPI compiler.")] = None,
    cxx: Annotated[str | None, typer.Option(metavar="PROGRAM", help="The C++ compiler.")] = None,
    cuda_home: Annotated[Path | None, typer.Option(metavar="FOLDER", help="The one with bin/nvcc.")] = None,
    nccl_home: Annotated[Path | None, typer.Option(metavar="FOLDER", help="The one with include/nccl.h.")] = None,
    launcher: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Starts ranks, up to their number: 'srun --mpi=pmix -n'.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at a time; else cores and memory say.")] = None,
) -> None:
    """Build Horovod for this environment's torch and MPI (minutes), test it on 2 ranks, and install it.

    A cache keeps the wheel: it is built again only for another torch, MPI, Python, CUDA or compiler.
    """
    from hpcdist.tools.horovod.build import default_folder, run
    from hpcdist.tools.horovod.toolset import BuildOptions

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
