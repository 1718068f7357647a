"""Recursive doubling: the minimum number of steps, exchanging whole vectors; for short tensors."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from hpcdist.collectives.base import TAG, Algorithm, Cost, Folding, core_steps
from hpcdist.comm.communicator import Communicator


@final
class RecursiveDoubling(Algorithm):
    """All-reduce in lg p steps: in step k ranks 2^k apart exchange whole vectors, and both add them.

    Steps for p ranks: lg p. Bytes sent per rank: n lg p for n bytes. If p is no power of two, folding the extra ranks
    costs two more steps and n more bytes.

    Reference: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
    2005.
    """

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        self._core = Folding(comm)

    def _sum(self, tensor: Tensor) -> None:
        core, remote = self._core, self.inbox.empty_like(tensor, tensor.numel())
        core.fold(tensor, remote)
        distance = 1
        while distance < core.size and not core.is_extra:
            partner = core.peer(core.rank ^ distance)
            self.comm.sendrecv(tensor, partner, remote, partner, TAG)
            # Both add in rank order: if both values are NaN, hardware keeps the payload of the first.
            lower, upper = (tensor, remote) if core.rank & distance == 0 else (remote, tensor)
            torch.add(lower, upper, out=tensor)
            distance *= 2
        core.unfold(tensor)

    @staticmethod
    def cost(n_bytes: float, size: int, ranks_per_node: int = 1) -> Cost:
        """Predict the cost: a node's link carries the bytes that all its ranks send to other nodes."""
        steps, folded = core_steps(size)
        local_steps = min(ranks_per_node.bit_length() - 1, steps)  # steps between ranks of one node
        sent = local_steps + ranks_per_node * (steps - local_steps) + 2 * folded
        return Cost(steps + 2 * folded, sent * n_bytes, (steps + folded) * n_bytes)
