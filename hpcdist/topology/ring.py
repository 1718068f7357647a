"""Ring: each rank averages with the rank before and the rank after."""

from __future__ import annotations

from typing import final

from hpcdist.topology.base import Circulant


@final
class RingGraph(Circulant):
    """A ring with weights 1/3 for the rank itself and both neighbours; 2 messages per rank. On 2 ranks weights are 1/2.

    Spectral gap ⅔(1 − cos(2π/p)) for p ≥ 3, which falls as 1/p².

    Reference: Xiangru Lian, Ce Zhang, Huan Zhang, Cho-Jui Hsieh, Wei Zhang, Ji Liu, "Can decentralized algorithms
    outperform centralized algorithms? A case study for decentralized parallel stochastic gradient descent", 2017.
    """

    symmetric = True

    def distances(self, step: int) -> tuple[int, ...]:
        return 0, 1, -1
