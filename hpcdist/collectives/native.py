"""The all-reduce of the library underneath."""

from __future__ import annotations

from typing import final

from torch import Tensor

from hpcdist.collectives.base import Algorithm
from hpcdist.collectives.ring import Ring


@final
class Native(Algorithm):
    """MPI's own all-reduce on real ranks; on virtual ones a ring whose sum is taken in rank order.

    Steps and bytes are the library's choice and not known; the traffic counted is that of a ring, the least for long
    tensors: 2n(p-1)/p.

    Reference: Message Passing Interface Forum, "MPI: A message-passing interface standard, version 4.1", 2023
    (MPI_Allreduce).
    """

    def _sum(self, tensor: Tensor) -> None:
        self.comm.allreduce(tensor)

    @staticmethod
    def traffic(n_bytes: int, size: int, ranks_per_node: int = 1) -> tuple[int, int]:
        return 2 * (size - 1) * n_bytes // size, 2 * (size - 1)

    @staticmethod
    def cost_s(
        n_bytes: float, size: int, latency_s: float, byte_s: float, reduce_s: float = 0.0, ranks_per_node: int = 1
    ) -> float:
        return Ring.cost_s(n_bytes, size, latency_s, byte_s, reduce_s)
