"""The MPI library of this Python: which it is, what it can do, and the end of all ranks by it.

`python -m hpcdist.comm.mpi.library` prints it, as JSON, without starting MPI; so nothing here imports mpi4py at once.
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
SETTLE_S = 0.5


def loaded(maps: str, name: re.Pattern = _LIBRARY) -> list[Path]:
    """Find the MPI libraries among the files that a process has mapped, in the order of their addresses.

    Args:
        maps: the text of /proc/PID/maps.
        name: of the files, if others are wanted.
    """
    lines = [line.split(maxsplit=5) for line in maps.splitlines()]
    files = dict.fromkeys(Path(line[5]) for line in lines if len(line) == 6)
    return [path for path in files if name.fullmatch(path.name)]


def loaded_here(name: re.Pattern = _LIBRARY) -> list[Path]:
    """Find the MPI libraries that this process has loaded; none where the system has no /proc."""
    return loaded(MAPS.read_text(), name) if MAPS.exists() else []


def missing() -> str:
    """Start MPI; return mpi4py's reason where no MPI library can be loaded, and an empty text otherwise."""
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
    """Say why this rank's MPI can't use the memory of its device; empty where it can, or where that is unknown."""
    import torch

    return explain(torch.cuda.device_count(), supports_cuda())


def explain(devices: int, supported: bool | None) -> str:
    """Say why MPI can't use device memory: `devices` CUDA devices, which MPI reads or not (None: unknown)."""
    if devices == 0:
        return "torch finds no CUDA device"
    return f"{version()} was built or started without CUDA support" if supported is False else ""


def supports_cuda() -> bool | None:
    """Ask MPI whether it reads CUDA memory; None where it has no such call, an extension of Open MPI and MPICH."""
    from mpi4py import MPI

    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)  # looked up in the library beneath too
    return None if query is None else bool(query())


# --- the end of all ranks ---------------------------------------------------------------------------------------------
def end(status: int) -> None:
    """End every rank of the job, once the launcher has had time to pass on what this rank has written.

    MPI_Abort would add lines of its own to that. PMIx, through which Open MPI's does it, adds none; elsewhere nobody
    hears them. Either way the status is not 0.
    """
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(SETTLE_S)  # MPICH's launcher drops what it has not read yet
    if _end_by_pmix(status):
        os._exit(status)  # as MPI_Abort does: a launcher that lets ranks outlive others waits for this one
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    MPI.COMM_WORLD.Abort(status)


def _end_by_pmix(status: int) -> bool:
    """Tell the launcher, through PMIx's library, to end every rank."""
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
