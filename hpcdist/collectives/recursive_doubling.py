"""Recursive doubling: the fewest steps, whole vectors; for short tensors."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from hpcdist.collectives.base import TAG, Algorithm, Cost, Folding, core_steps
from hpcdist.comm.communicator import Communicator


@final
class RecursiveDoubling(Algorithm):
    """Exchange whole vectors between ranks 2^k apart in step k, and add them on both.

    Steps: lg p. Bytes sent per rank: n lg p. Where p is no power of two, folding the extra ranks costs two more steps
    and n more bytes.

    Reference: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
    2005.
    """

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        self._core = Folding(comm)

    def _sum(self, tensor: Tensor) -> None:
        core, theirs = self._core, self.inbox.like(tensor, tensor.numel())
        core.fold(tensor, theirs)
        distance = 1
        while distance < core.size and not core.outside:
            partner = core.peer(core.rank ^ distance)
            self.comm.sendrecv(tensor, partner, theirs, partner, TAG)
            # Both add in rank order: where both are NaN, hardware keeps the payload of the first.
            lower, upper = (tensor, theirs) if core.rank & distance == 0 else (theirs, tensor)
            torch.add(lower, upper, out=tensor)
            distance *= 2
        core.unfold(tensor)

    @staticmethod
    def cost(n_bytes: float, size: int, ranks_per_node: int = 1) -> Cost:
        """Predict the cost; the ranks of a node share its link in the exchanges with other nodes."""
        steps, folded = core_steps(size)
        inside = min(ranks_per_node.bit_length() - 1, steps)
        sent = inside + ranks_per_node * (steps - inside) + 2 * folded
        return Cost(steps + 2 * folded, sent * n_bytes, (steps + folded) * n_bytes)
