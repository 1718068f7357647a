"""Collective calls by the MPI library's functions: across nodes, and for long copies inside one node.

Before each call the ranks compare its fingerprint, so that a mismatch is refused before anything is overwritten. MPI
does not specify the order of additions, and lacks some operations and dtypes: so only sums and means use the fastest
all-reduce. Other reductions exchange the ranks' tensors, and combine them in rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hpcdist.collectives.base import Scratch
from hpcdist.collectives.calls.exchange import MESSAGE_BYTES
from hpcdist.collectives.calls.prepared import PreparedCall
from hpcdist.collectives.calls.reduction import reduction
from hpcdist.comm.communicator import Communicator

SUMMED = {torch.float32, torch.float64, torch.int32, torch.int64, torch.complex64, torch.complex128}

Agree = Callable[[int], bool]  # returns whether all ranks have this fingerprint
Fastest = Callable[[str], Callable[[Tensor], None]]  # maps "sum" or "mean" to the fastest all-reduce


class CallsByLibrary:
    """Prepares calls by the MPI library; methods return None if point-to-point messages are faster.

    The methods have the arguments of those of `PreparedCalls`.
    """

    def __init__(self, comm: Communicator, agree: Agree, fastest: Fastest):
        self.comm: Any = comm  # an MpiCommunicator
        self.size = comm.size
        self._agree, self._fastest, self._inbox = agree, fastest, Scratch()

    def all_reduce(self, fingerprint: int, dtype: torch.dtype, count: int, operation: str) -> PreparedCall | None:
        if operation in ("sum", "mean") and dtype in SUMMED:
            return self._agreed(fingerprint, lambda local: self._fastest(operation)(local))
        return None

    def broadcast(self, fingerprint: int, dtype: torch.dtype, count: int, root: int) -> PreparedCall:
        return self._agreed(fingerprint, lambda local: self.comm.broadcast(local, root))

    def all_gather(self, fingerprint: int, dtype: torch.dtype, count: int) -> PreparedCall:
        def make(out: Tensor, local: Tensor) -> None:
            overlaps = out.data_ptr() <= local.data_ptr() < out.data_ptr() + out.nbytes
            self.comm.all_gather(out, local.clone() if overlaps else local)  # MPI forbids overlapping buffers

        return self._agreed(fingerprint, make)

    def all_to_all(self, fingerprint: int, dtype: torch.dtype, count: int) -> PreparedCall:
        def make(out: Tensor, inputs: Tensor) -> None:
            self.comm.all_to_all(out, inputs.clone() if out.data_ptr() == inputs.data_ptr() else inputs)

        return self._agreed(fingerprint, make)

    def reduce_scatter(self, fingerprint: int, dtype: torch.dtype, count: int, operation: str) -> PreparedCall | None:
        if self.size * count * dtype.itemsize > MESSAGE_BYTES:  # messages are then combined while others are in flight
            return None
        combine = reduction(operation, dtype)

        def make(out: Tensor, inputs: Tensor) -> None:
            received = self._inbox.empty_like(inputs, len(inputs))
            self.comm.all_to_all(received, inputs)
            combine(list(received.view(self.size, -1)), out)

        return self._agreed(fingerprint, make)

    def _agreed(self, fingerprint: int, make: Callable[..., None]) -> PreparedCall:
        """Return the call `make`, on flat tensors, run if all ranks have the same fingerprint."""

        def call(*tensors: Tensor) -> bool:
            agreed = self._agree(fingerprint)
            if agreed:
                make(*(tensor.detach().view(-1) for tensor in tensors))
            return agreed

        return call
