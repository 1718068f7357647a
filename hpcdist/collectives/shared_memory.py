"""Shared-memory all-reduce inside one node: each rank publishes its tensor in a window, and adds up the others'."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from hpcdist.collectives.base import Algorithm, chunks, segment_count, sum_in_rank_order
from hpcdist.comm.communicator import Communicator

SEGMENT_BYTES = 1 << 21  # two slots of it per rank in shared memory: small enough for 64 MiB of /dev/shm
SLOTS = 2
MOST_RANKS = 8  # with more, reading everything never pays, and the windows fill /dev/shm


@final
class SharedMemory(Algorithm):
    """Copy each rank's tensor into a window of shared memory, and add up the windows of all ranks after a barrier.

    One barrier and n(p-1) bytes read, where others wait for each other more often to read less: the fastest of all
    for few ranks and medium lengths. Nothing is sent. Longer tensors pass in segments, in two slots in turn: a rank
    that fills a slot again has passed the barrier that the last reader of its former content came to after reading.
    The sum is taken in rank order: bitwise that of a loop over the ranks.

    Reference: R. Graham, G. Shipman, "MPI support for multi-core architectures: optimized shared memory collectives",
    2008.
    """

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        self._window = comm.window(SLOTS * SEGMENT_BYTES, torch.uint8)
        self._turn = 0  # slots go on in turn from call to call, as others may still read the last one

    @staticmethod
    def suits(comm: Communicator) -> bool:
        return 1 < comm.size <= MOST_RANKS and len(set(comm.memory.nodes)) == 1

    def _sum(self, tensor: Tensor) -> None:
        if tensor.nbytes <= SEGMENT_BYTES:
            self._sum_segment(tensor)
        else:
            for segment in chunks(tensor, segment_count(tensor.nbytes, SEGMENT_BYTES)):
                self._sum_segment(segment)

    def _sum_segment(self, segment: Tensor) -> None:
        comm, start, n_bytes = self.comm, self._turn % SLOTS * SEGMENT_BYTES, segment.nbytes
        self._turn += 1

        def read(peer: int) -> Tensor:
            return self._window.read(peer, start, n_bytes).view(segment.dtype)

        self._window.put(segment.view(torch.uint8), comm.rank, start)
        comm.barrier()
        sum_in_rank_order(segment, comm.rank, comm.size, read, lambda: self.inbox.like(segment, segment.numel()))

    def close(self) -> None:
        self._window.close()

    @staticmethod
    def traffic(n_bytes: int, size: int, ranks_per_node: int = 1) -> tuple[int, int]:
        return 0, 0

    @staticmethod
    def cost_s(
        n_bytes: float, size: int, latency_s: float, byte_s: float, reduce_s: float = 0.0, ranks_per_node: int = 1
    ) -> float:
        """Predict the seconds of a call as if copies were fetched, each by a request and a reply: an upper bound."""
        return (size - 1).bit_length() * latency_s + (size - 1) * (2 * latency_s + n_bytes * (byte_s + reduce_s))
