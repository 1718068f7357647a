"""The MPI library's all-reduce."""

from __future__ import annotations

from typing import final

from torch import Tensor

from hpcdist.collectives.base import Algorithm, Cost
from hpcdist.collectives.ring import Ring


@final
class Native(Algorithm):
    """All-reduce by MPI_Allreduce on real ranks; on virtual ranks by a simulated ring that adds in rank order.

    The library chooses its algorithm without reporting it; traffic is counted as that of a ring, the minimum for long
    tensors: 2n(p-1)/p bytes per rank for n bytes and p ranks.

    Reference: Message Passing Interface Forum, "MPI: A message-passing interface standard, version 4.1", 2023
    (MPI_Allreduce).
    """

    def _sum(self, tensor: Tensor) -> None:
        self.comm.allreduce(tensor)

    @staticmethod
    def cost(n_bytes: float, size: int, ranks_per_node: int = 1) -> Cost:
        return Ring.cost(n_bytes, size)
