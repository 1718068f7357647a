"""Which MPI this Python uses. `python -m hpcdist.comm.mpi_library` tells it, as JSON, without starting MPI."""

from __future__ import annotations

import json
import re
from pathlib import Path

# Names of MPI's library for C: Open MPI's, MPICH's and Intel's; MPICH's older one; Cray's, by compiler.
_LIBRARY = re.compile(r"libmpi(?:ch)?(?:_(?:cray|gnu|intel|nvidia)\w*)?\.so[.\d]*$")
MAPS = Path("/proc/self/maps")


def loaded(maps: str) -> list[Path]:
    """The MPI libraries among the files that a process has mapped, in the order of their addresses.

    Args:
        maps: the text of /proc/PID/maps.
    """
    lines = [line.split(maxsplit=5) for line in maps.splitlines()]
    files = dict.fromkeys(Path(line[5]) for line in lines if len(line) == 6)
    return [path for path in files if _LIBRARY.fullmatch(path.name)]


def loaded_here() -> list[Path]:
    """The MPI libraries that this process has loaded; none where the system doesn't tell."""
    return loaded(MAPS.read_text()) if MAPS.exists() else []


def _tell() -> dict[str, str | None]:
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    version = MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0")
    files = loaded_here()
    return {"version": " ".join(version.split()), "file": str(files[0]) if files else None}


if __name__ == "__main__":
    print(json.dumps(_tell()))
