"""Ring: each rank averages with the rank before and the rank after."""

from __future__ import annotations

from typing import final

from hpcdist.topology.base import Circulant


@final
class RingGraph(Circulant):
    """Average with the previous and the next rank: weights 1/3 for the rank and both neighbours, 1/2 on 2 ranks.

    2 messages per rank and step. Spectral gap ⅔(1 − cos(2π/p)) for p ≥ 3 ranks, which falls as 1/p².

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "dpsgd", topology="ring")

    Reference: Xiangru Lian, Ce Zhang, Huan Zhang, Cho-Jui Hsieh, Wei Zhang, Ji Liu, "Can decentralized algorithms
    outperform centralized algorithms? A case study for decentralized parallel stochastic gradient descent", 2017.
    """

    symmetric = True

    def distances(self, step: int) -> tuple[int, ...]:
        return 0, 1, -1
