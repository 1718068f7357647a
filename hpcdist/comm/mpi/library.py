"""The MPI library of this Python. `python -m hpcdist.comm.mpi.library` prints it, as JSON, without starting MPI."""

from __future__ import annotations

import json
import re
from pathlib import Path

# Names of MPI's library for C: Open MPI's, MPICH's and Intel's; MPICH's older one; Cray's, by compiler.
_LIBRARY = re.compile(r"libmpi(?:ch)?(?:_(?:cray|gnu|intel|nvidia)\w*)?\.so[.\d]*$")
_PMIX = re.compile(r"libpmix\.so[.\d]*$")
MAPS = Path("/proc/self/maps")


def loaded(maps: str, name: re.Pattern = _LIBRARY) -> list[Path]:
    """Find the MPI libraries among the files that a process has mapped, in the order of their addresses.

    Args:
        maps: the text of /proc/PID/maps.
        name: of the libraries, if others are wanted.
    """
    lines = [line.split(maxsplit=5) for line in maps.splitlines()]
    files = dict.fromkeys(Path(line[5]) for line in lines if len(line) == 6)
    return [path for path in files if name.fullmatch(path.name)]


def loaded_here() -> list[Path]:
    """Find the MPI libraries that this process has loaded; none where the system has no /proc."""
    return loaded(MAPS.read_text()) if MAPS.exists() else []


def pmix_here() -> list[Path]:
    """Find the libraries of PMIx, MPI's connection to the launcher, that this process has loaded."""
    return loaded(MAPS.read_text(), _PMIX) if MAPS.exists() else []


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


def _tell() -> dict[str, str | None]:
    import mpi4py

    mpi4py.rc.initialize = False
    name, files = version(), loaded_here()
    return {"version": name, "file": str(files[0]) if files else None}


if __name__ == "__main__":
    print(json.dumps(_tell()))
