"""MPI's own all-reduce as a program without hpcdist calls it: what ours is measured against."""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI
from torch import Tensor

from hpcdist.comm.communicator import Communicator


def plain_allreduce(comm: Communicator) -> Callable[[Tensor], None]:
    """Sums a tensor on the host over the ranks of `comm`, in place, by mpi4py alone. The call is Collective."""
    call, in_place = comm.mpi.Allreduce, MPI.IN_PLACE
    return lambda tensor: call(in_place, tensor.numpy())
