"""Complete graph: everybody averages with everybody."""

from __future__ import annotations

from typing import final

from hpcdist.topology.base import Circulant


@final
class Complete(Circulant):
    """The complete graph, W = 11ᵀ/p: the exact mean at every step, for p − 1 messages per rank. Spectral gap 1.

    Reference: Xiangru Lian, Ce Zhang, Huan Zhang, Cho-Jui Hsieh, Wei Zhang, Ji Liu, "Can decentralized algorithms
    outperform centralized algorithms? A case study for decentralized parallel stochastic gradient descent", 2017.
    """

    symmetric = complete = True

    def distances(self, step: int) -> range:
        return range(self.size)
