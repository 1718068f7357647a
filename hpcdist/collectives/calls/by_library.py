"""Collective calls by the library underneath, MPI's own, prepared by shape: across nodes, and for long copies in one.

Before each of them the ranks agree on what they call: by their slots. So what differs is refused
before anything is overwritten. MPI leaves open in what order it adds, and has neither all operations nor all dtypes:
so only sums take the fastest all-reduce. Otherwise ranks exchange what they bring, and combine it in rank order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hpcdist.collectives.base import Scratch
from hpcdist.collectives.calls.exchange import MESSAGE_BYTES
from hpcdist.collectives.calls.prepared import PreparedCall
from hpcdist.collectives.calls.reduction import reduction
from hpcdist.comm.communicator import Communicator

SUMMED = {torch.float32, torch.float64, torch.int32, torch.int64, torch.complex64, torch.complex128}

Agree = Callable[[int], bool]  # tells whether all ranks have a note
Fastest = Callable[[str], Callable[[Tensor], None]]  # returns the fastest all-reduce, for a sum or a mean


class AgreedCall(PreparedCall):
    """A call that is made once all ranks have agreed on it.

    Args:
        make: the call, of flat tensors.
    """

    def __init__(self, agree: Agree, fingerprint: int, make: Callable[..., None]):
        self._agree, self._fingerprint, self._make = agree, fingerprint, make

    def __call__(self, *tensors: Tensor) -> bool:
        if not self._agree(self._fingerprint):
            return False
        self._make(*(tensor.detach().view(-1) for tensor in tensors))
        return True


class CallsByLibrary:
    """Prepares calls; None where messages are faster.

    See PreparedCalls for the args of the methods.
    """

    def __init__(self, comm: Communicator, agree: Agree, fastest: Fastest):
        from hpcdist.comm.mpi.messages import MpiLibraryCalls  # starts MPI, which importing this must not

        self.comm, self.size, self.library = comm, comm.size, MpiLibraryCalls(comm)
        self._agree, self._fastest, self._inbox = agree, fastest, Scratch()

    def all_reduce(self, fingerprint: int, dtype: torch.dtype, count: int, operation: str) -> AgreedCall | None:
        if operation in ("sum", "mean") and dtype in SUMMED:
            return self._agreed(fingerprint, lambda own: self._fastest(operation)(own))
        return None

    def broadcast(self, fingerprint: int, dtype: torch.dtype, count: int, root: int) -> AgreedCall:
        return self._agreed(fingerprint, lambda own: self.comm.broadcast(own, root))

    def all_gather(self, fingerprint: int, dtype: torch.dtype, count: int) -> AgreedCall:
        def make(out: Tensor, own: Tensor) -> None:
            inside = out.data_ptr() <= own.data_ptr() < out.data_ptr() + out.nbytes
            self.library.all_gather(out, own.clone() if inside else own)

        return self._agreed(fingerprint, make)

    def all_to_all(self, fingerprint: int, dtype: torch.dtype, count: int) -> AgreedCall:
        def make(out: Tensor, given: Tensor) -> None:
            self.library.all_to_all(out, given.clone() if out.data_ptr() == given.data_ptr() else given)

        return self._agreed(fingerprint, make)

    def reduce_scatter(self, fingerprint: int, dtype: torch.dtype, count: int, operation: str) -> AgreedCall | None:
        if self.size * count * dtype.itemsize > MESSAGE_BYTES:  # then messages are combined while others are under way
            return None
        combine = reduction(operation, dtype)

        def make(out: Tensor, given: Tensor) -> None:
            found = self._inbox.empty_like(given, len(given))
            self.library.all_to_all(found, given)
            combine(list(found.view(self.size, -1)), out)

        return self._agreed(fingerprint, make)

    def _agreed(self, fingerprint: int, make: Callable[..., None]) -> AgreedCall:
        return AgreedCall(self._agree, fingerprint, make)
