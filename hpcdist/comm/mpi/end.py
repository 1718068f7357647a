"""The end of every rank of the job."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from contextlib import suppress

from mpi4py import MPI

from hpcdist.comm.mpi.library import pmix_here

SETTLE_S = 0.5


def end(status: int) -> None:
    """End every rank of the job, once the launcher has had time to pass on what this rank has written.

    MPI_Abort would add lines of its own to that. PMIx, through which Open MPI's does it, adds none; elsewhere nobody
    hears them. Either way the status is not 0.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(SETTLE_S)  # MPICH's launcher drops what it has not read yet
    if _end_by_pmix(status):
        os._exit(status)  # as MPI_Abort does: a launcher that lets ranks outlive others waits for this one
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stderr__.fileno())
    MPI.COMM_WORLD.Abort(status)


def _end_by_pmix(status: int) -> bool:
    """Tell the launcher, through PMIx's library, to end every rank."""
    files = pmix_here()
    try:
        return bool(files) and ctypes.CDLL(str(files[0])).PMIx_Abort(ctypes.c_int(status), b"", None, 0) == 0
    except (OSError, AttributeError):
        return False
