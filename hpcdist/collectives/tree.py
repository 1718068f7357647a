"""Binomial tree: a reduction to rank 0, then a broadcast from it."""

from __future__ import annotations

from typing import final

from torch import Tensor

from hpcdist.collectives.base import TAG, Algorithm, Cost
from hpcdist.comm.communicator import Communicator


@final
class Tree(Algorithm):
    """All-reduce by a reduction up a binomial tree to rank 0, then a broadcast down the tree.

    Steps for p ranks: 2⌈lg p⌉. Bytes sent by the busiest rank (the root): n⌈lg p⌉ for n bytes; by all ranks: 2n(p-1),
    the minimum of all algorithms that send whole vectors.

    Reference: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
    2005 (reduce and broadcast for short messages).
    """

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        lowest_bit = comm.rank & -comm.rank or comm.size  # a rank's subtree: the ranks that differ below that bit
        self._parent = comm.rank - lowest_bit  # unused on the root
        distances = (1 << k for k in range(comm.size.bit_length()))
        self._children = [comm.rank + d for d in distances if d < lowest_bit and comm.rank + d < comm.size]

    def _sum(self, tensor: Tensor) -> None:
        """Add the children's sums, always in this order; send the sum to the parent, and its result to the children."""
        comm, remote = self.comm, self.inbox.empty_like(tensor, tensor.numel())
        for child in self._children:
            comm.irecv(remote, child, TAG).wait()
            tensor.add_(remote)
        if comm.rank != 0:
            comm.isend(tensor, self._parent, TAG).wait()
            comm.irecv(tensor, self._parent, TAG).wait()
        for child in reversed(self._children):  # the largest subtree first: its broadcast takes longest
            comm.isend(tensor, child, TAG).wait()

    @staticmethod
    def cost(n_bytes: float, size: int, ranks_per_node: int = 1) -> Cost:
        steps = (size - 1).bit_length()
        return Cost(2 * steps, 2 * steps * n_bytes, steps * n_bytes)
