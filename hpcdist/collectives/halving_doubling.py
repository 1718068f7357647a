"""Recursive halving and doubling: as few bytes as the ring, in lg p steps instead of p."""

from __future__ import annotations

from typing import final

from torch import Tensor

from hpcdist.collectives.base import TAG, Algorithm, Cost, Folding, core_steps
from hpcdist.comm.communicator import Communicator


@final
class HalvingDoubling(Algorithm):
    """All-reduce by a reduce-scatter with recursive halving, then an all-gather with recursive doubling.

    Partners p/2 apart exchange halves of the vector and add, then partners p/4 apart exchange quarters, and so on,
    until each of p ranks holds one block of the sum; the same exchanges in reverse order gather the blocks. Steps:
    2 lg p. Bytes sent per rank: 2n(p-1)/p for n bytes. If p is no power of two, folding the extra ranks costs two more
    steps and n more bytes.

    Reference: R. Rabenseifner, "Optimization of collective reduction operations", 2004.
    """

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        self._core = Folding(comm)

    def _sum(self, tensor: Tensor) -> None:
        core, count = self._core, tensor.numel()
        remote = self.inbox.empty_like(tensor, count if core.size < self.comm.size else -(-count // 2))
        core.fold(tensor, remote)
        if not core.is_extra:
            halves = self._halves(tensor)
            for partner, kept, sent in halves:  # reduce-scatter
                inbox = remote[: kept.numel()]
                self._exchange(sent, inbox, partner)
                kept.add_(inbox)
            for partner, kept, sent in reversed(halves):  # all-gather, into the halves that were sent
                self._exchange(kept, sent, partner)
        core.unfold(tensor)

    def _halves(self, tensor: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """Return for each halving the partner, the half that this rank keeps, and the half that it sends."""
        core = self._core
        low, high, halves = 0, core.size, []
        while high - low > 1:
            middle = (low + high) // 2
            partner = core.peer(core.rank ^ (high - middle))
            start, cut, end = (tensor.numel() * block // core.size for block in (low, middle, high))  # as by `bounds`
            lower, upper = tensor[start:cut], tensor[cut:end]
            if core.rank < middle:
                halves.append((partner, lower, upper))
                high = middle
            else:
                halves.append((partner, upper, lower))
                low = middle
        return halves

    def _exchange(self, send: Tensor, recv: Tensor, partner: int) -> None:
        """Send and receive; unlike in `sendrecv` the lengths may differ (halves of an odd number of elements)."""
        arriving = self.comm.irecv(recv, partner, TAG)
        leaving = self.comm.isend(send, partner, TAG)
        arriving.wait()
        leaving.wait()

    @staticmethod
    def cost(n_bytes: float, size: int, ranks_per_node: int = 1) -> Cost:
        """Predict the cost: a node's link carries the bytes that all its ranks send to other nodes."""
        steps, folded = core_steps(size)
        # The parts of the vector that a rank sends in each phase: in all, and to other nodes.
        share, outside = 1 - 1 / (1 << steps), 1 - min(ranks_per_node, 1 << steps) / (1 << steps)
        sent = ranks_per_node * outside + share - outside
        return Cost(2 * (steps + folded), 2 * (sent + folded) * n_bytes, (share + folded) * n_bytes)
