"""Shared-memory all-reduce inside one node: each rank shows its tensor to the others, and adds up theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast, final

import torch
from torch import Tensor

from hpcdist.collectives.base import Algorithm, Cost, chunks, segment_count, sum_in_rank_order
from hpcdist.collectives.calls.prepared import PreparedCall, PreparedCalls, remember
from hpcdist.collectives.calls.tensors import type_of
from hpcdist.comm.communicator import Communicator, Window
from hpcdist.errors import MismatchError

SEGMENT_BYTES = 1 << 21  # two slots of it per rank in shared memory: small enough for 64 MiB of /dev/shm
SLOTS = 2
MOST_RANKS = 8  # with more, reading everything never pays, and the windows fill /dev/shm


@final
class SharedMemory(Algorithm):
    """Copy each rank's tensor into memory that all ranks have mapped, and add up those of all ranks.

    Ranks wait for each other once, and n(p-1) bytes are read; through slots, from three ranks and 32 KiB on, twice, to
    read 2n. Others wait more often: so it is the fastest of all for few ranks and medium lengths. Nothing is sent.
    Longer tensors pass in segments, in two slots in turn: a rank that fills a slot again has met the others since the
    last of them read its former content. The sum is taken in rank order: bitwise that of a loop over the ranks.

    Reference: R. Graham, G. Shipman, "MPI support for multi-core architectures: optimized shared memory collectives",
    2008.
    """

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        shows = self.suits(comm) and comm.trace.timeline is None  # which notes barriers, and no meetings
        self._slots = comm.memory.slots(SEGMENT_BYTES, "allreduce") if shows else None
        self._prepared = None if self._slots is None else PreparedCalls(self._slots, comm)
        self._known: dict[tuple[int, torch.dtype], PreparedCall] = {}  # by length and dtype
        self._window = comm.window(SLOTS * SEGMENT_BYTES, torch.uint8) if self._slots is None else None
        self._turn = 0  # of the window's slots

    @staticmethod
    def suits(comm: Communicator) -> bool:
        return 1 < comm.size <= MOST_RANKS and len(set(comm.nodes)) == 1

    def _sum(self, tensor: Tensor) -> None:
        if self._prepared is not None:
            key = len(tensor), tensor.dtype
            call = self._known.get(key)
            if call is None:
                made = self._prepared.all_reduce(_fingerprint(tensor), tensor.dtype, len(tensor), "sum")
                call = remember(self._known, key, made)
            if not call(tensor):
                self._refuse(tensor)
            return
        for segment in chunks(tensor, segment_count(tensor.nbytes, SEGMENT_BYTES)):
            sum_in_rank_order(
                segment, self.comm.rank, self.comm.size, self._gathered(segment),
                lambda: self.inbox.like(segment, segment.numel()),
            )  # fmt: skip

    def _gathered(self, segment: Tensor) -> Callable[[int], Tensor]:
        """Show a segment in a window, where there are no slots; return what reads the others'."""
        window, start, n_bytes = cast(Window, self._window), self._turn % SLOTS * SEGMENT_BYTES, segment.nbytes
        self._turn += 1
        window.put(segment.view(torch.uint8), self.comm.rank, start)
        self.comm.barrier()
        return lambda peer: window.read(peer, start, n_bytes).view(segment.dtype)

    def _refuse(self, tensor: Tensor) -> None:
        found = self.comm.gather(f"{tensor.numel()} of {type_of(tensor.dtype)}")
        raise MismatchError(
            "tensors that are summed must have the same length and dtype on all ranks; got, in rank order, "
            f"{', '.join(found)}. Give all the same."
        )

    def close(self) -> None:
        self._known.clear()
        for held in (self._slots, self._window):
            if held is not None:
                held.close()

    @staticmethod
    def cost(n_bytes: float, size: int, ranks_per_node: int = 1) -> Cost:
        """Predict the cost as if copies were fetched, each by a request and a reply: an upper bound."""
        peers = size - 1
        return Cost(peers.bit_length() + 2 * peers, peers * n_bytes, peers * n_bytes)


def _fingerprint(tensor: Tensor) -> int:
    return hash((tensor.numel(), tensor.itemsize, tensor.is_floating_point()))
