"""MPI's own all-reduce as a program without hpcdist calls it: the reference of measurements."""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI
from torch import Tensor

from hpcdist.comm.communicator import Communicator, mpi_of


def plain_allreduce(comm: Communicator) -> Callable[[Tensor], None]:
    """Sum a tensor on the host over the ranks of `comm`, in place, by mpi4py alone. The call is Collective."""
    call, in_place = mpi_of(comm).Allreduce, MPI.IN_PLACE
    return lambda tensor: call(in_place, tensor.numpy())
