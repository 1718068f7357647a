"""Shared-memory all-reduce inside one node: each rank copies its tensor to shared memory, and sums all tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast, final

import torch
from torch import Tensor

from hpcdist.collectives.base import Algorithm, Cost, chunks, segment_count, sum_in_rank_order
from hpcdist.collectives.calls.prepared import PreparedCalls, SlotCall, remember
from hpcdist.collectives.calls.tensors import type_of
from hpcdist.comm.communicator import Communicator, Window
from hpcdist.errors import MismatchError

SEGMENT_BYTES = 1 << 21  # two slots of it per rank in shared memory: small enough for 64 MiB of /dev/shm
SLOTS = 2  # of the window, which is used if there are no `Slots`
MAX_RANKS = 8  # with more, reading everything never pays, and the windows fill /dev/shm


@final
class SharedMemory(Algorithm):
    """All-reduce by copying each rank's tensor into shared memory of the node, from which every rank sums all tensors.

    Ranks synchronize once and each reads n(p-1) bytes, for p ranks and n bytes; with slots, for 3 ranks or more and at
    least 32 KiB, they synchronize twice and read 2n. Other algorithms synchronize more often, so this one is the
    fastest for few ranks and medium lengths. No messages are sent. Longer tensors pass in segments, with two slots in
    turn: all ranks synchronize between the last read of a slot and its next write. Addends are added in rank order, so
    results are reproducible.

    Reference: R. Graham, G. Shipman, "MPI support for multi-core architectures: optimized shared memory collectives",
    2008.
    """

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        use_slots = self.suits(comm) and comm.trace.timeline is None  # a timeline shows barriers, but not slots
        self._slots = comm.memory.slots(SEGMENT_BYTES, "allreduce") if use_slots else None
        self._prepared = None if self._slots is None else PreparedCalls(self._slots, comm)
        self._known: dict[tuple[int, torch.dtype], SlotCall] = {}  # by length and dtype
        self._window = comm.window(SLOTS * SEGMENT_BYTES, torch.uint8) if self._slots is None else None
        self._turn = 0  # which slot of the window is next

    @staticmethod
    def suits(comm: Communicator) -> bool:
        return 1 < comm.size <= MAX_RANKS and len(set(comm.nodes)) == 1

    def _sum(self, tensor: Tensor) -> None:
        """Sum through `Slots`, by a call prepared for this length and dtype; without `Slots`, through the window."""
        if self._prepared is not None:
            key = len(tensor), tensor.dtype
            call = self._known.get(key)
            if call is None:
                fingerprint = hash((len(tensor), tensor.itemsize, tensor.is_floating_point()))
                call = self._prepared.all_reduce(fingerprint, tensor.dtype, len(tensor), "sum")
                remember(self._known, key, call)
            if not call(tensor):
                self._refuse(tensor)
            return
        for segment in chunks(tensor, segment_count(tensor.nbytes, SEGMENT_BYTES)):
            sum_in_rank_order(
                segment, self.comm.rank, self.comm.size, self._gathered(segment),
                lambda: self.inbox.empty_like(segment, segment.numel()),
            )  # fmt: skip

    def _gathered(self, segment: Tensor) -> Callable[[int], Tensor]:
        """Publish a segment in the window, used without slots; return a function that reads a rank's segment."""
        window, start, n_bytes = cast(Window, self._window), self._turn % SLOTS * SEGMENT_BYTES, segment.nbytes
        self._turn += 1
        window.put(segment.view(torch.uint8), self.comm.rank, start)
        self.comm.barrier()
        return lambda peer: window.read(peer, start, n_bytes).view(segment.dtype)

    def _refuse(self, tensor: Tensor) -> None:
        """Collective: each rank contributes its length and dtype to the message."""
        tensors = self.comm.gather(f"{tensor.numel()} of {type_of(tensor.dtype)}")
        raise MismatchError(
            "tensors that are summed must have the same length and dtype on all ranks; got, in rank order, "
            f"{', '.join(tensors)}. Check the call on each rank."
        )

    def close(self) -> None:
        self._known.clear()
        for resource in (self._slots, self._window):
            if resource is not None:
                resource.close()

    @staticmethod
    def cost(n_bytes: float, size: int, ranks_per_node: int = 1) -> Cost:
        """Predict the cost, an upper bound: as if each copy were fetched by a request and a reply."""
        peers = size - 1
        return Cost(peers.bit_length() + 2 * peers, peers * n_bytes, peers * n_bytes)
