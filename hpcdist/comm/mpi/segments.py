"""Unlinking, while the job runs, of the files in shared memory through which ranks of one node exchange messages.

MPI's library makes them as it starts, and unlinks them as it ends; a job that is killed leaves them behind (16 MB per
rank with Open MPI, even of one that ends well where there is no launcher). Once all ranks of a node have mapped a file
nobody needs its name any more, and the kernel frees the memory when the last of them ends, however that happens.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

from mpi4py import MPI

from hpcdist.comm.mpi import library

_SEGMENT = re.compile(r"/\S*/(?:(?:sm|vader)_segment\.|mpich_shm_)\S+$")  # Open MPI's, MPICH's


def mapped(maps: str) -> set[str]:
    """Find the segments among the files that a process has mapped, without those that are unlinked already.

    Args:
        maps: the text of /proc/PID/maps.
    """
    lines = [line.split(maxsplit=5) for line in maps.splitlines()]
    return {line[5] for line in lines if len(line) == 6 and _SEGMENT.match(line[5])}


def unlink(node: MPI.Intracomm) -> None:
    """Collective. Remove the names of the segments that all ranks of a node have mapped."""
    own = mapped(library.MAPS.read_text()) if library.MAPS.exists() else set()
    for path in set.intersection(*node.allgather(own)):
        with suppress(OSError):  # another rank has been faster
            os.unlink(path)
