"""The MPI library of this Python environment: its name and version, its features, and the call that ends all ranks.

`python -m hpcdist.comm.mpi.library` prints it as JSON without starting MPI; so mpi4py is imported only in functions.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

# Names of MPI's library for C: Open MPI's, MPICH's and Intel's; MPICH's older one; Cray's, by compiler.
_LIBRARY = re.compile(r"libmpi(?:ch)?(?:_(?:cray|gnu|intel|nvidia)\w*)?\.so[.\d]*$")
# MPI's connection to the launcher.
_PMIX = re.compile(r"libpmix\.so[.\d]*$")
MAPS = Path("/proc/self/maps")
FLUSH_S = 0.5  # for the launcher to read what this rank has written


def loaded(maps: str, name: re.Pattern = _LIBRARY) -> list[Path]:
    """Return the MPI libraries among the files that a process has mapped, in the order of their addresses.

    Args:
        maps: the text of /proc/PID/maps.
        name: pattern of the file names, to find other files.
    """
    lines = [line.split(maxsplit=5) for line in maps.splitlines()]
    files = dict.fromkeys(Path(line[5]) for line in lines if len(line) == 6)
    return [path for path in files if name.fullmatch(path.name)]


def loaded_here(name: re.Pattern = _LIBRARY) -> list[Path]:
    """Return the MPI libraries that this process has loaded; none on a system without /proc."""
    return loaded(MAPS.read_text(), name) if MAPS.exists() else []


def missing() -> str:
    """Start MPI; return mpi4py's error if no MPI library can be loaded, an empty text otherwise."""
    try:
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:
        return " ".join(str(error).split())
    return ""


def version() -> str:
    """Return the MPI library's name and version, one line. Starts MPI, unless mpi4py is configured not to."""
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0").split())


# --- device memory ----------------------------------------------------------------------------------------------------
def device_obstacle() -> str:
    """Return why this rank's MPI can't access device memory; empty if it can, or if that is unknown."""
    import torch

    return explain(torch.cuda.device_count(), supports_cuda())


def explain(devices: int, supported: bool | None) -> str:
    """Return why MPI can't access the memory of `devices` CUDA devices; `supported`: MPI's reply, None if unknown."""
    if devices == 0:
        return "torch finds no CUDA device"
    return f"{version()} was built or started without CUDA support" if supported is False else ""


def supports_cuda() -> bool | None:
    """Return whether MPI supports CUDA memory; None if unknown: the query is an extension of Open MPI and MPICH."""
    from mpi4py import MPI

    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)  # found in the MPI library, too
    return None if query is None else bool(query())


# --- the end of all ranks ---------------------------------------------------------------------------------------------
def end(status: int) -> None:
    """End all ranks of the job, after the launcher has had time to forward this rank's output.

    MPI_Abort prints additional lines. So this uses PMIx under Open MPI, and elsewhere closes standard error first. The
    exit status is never 0.
    """
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(FLUSH_S)  # MPICH's launcher drops output that it has not read yet
    if _end_by_pmix(status):
        os._exit(status)  # like MPI_Abort: a launcher that tolerates deaths waits for this rank
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    MPI.COMM_WORLD.Abort(status)


def _end_by_pmix(status: int) -> bool:
    """Ask the launcher through the PMIx library to end all ranks; return whether that worked."""
    files = loaded_here(_PMIX)
    try:
        return bool(files) and ctypes.CDLL(str(files[0])).PMIx_Abort(ctypes.c_int(status), b"", None, 0) == 0
    except (OSError, AttributeError):
        return False


def _tell() -> dict[str, str | None]:
    import mpi4py

    mpi4py.rc.initialize = False
    name, files = version(), loaded_here()
    return {"version": name, "file": str(files[0]) if files else None}


if __name__ == "__main__":
    print(json.dumps(_tell()))
