"""Complete graph: every rank averages with every other rank."""

from __future__ import annotations

from typing import final

from hpcdist.topology.base import Circulant


@final
class Complete(Circulant):
    """Average with all ranks at every step: the complete graph, W = 11ᵀ/p for p ranks.

    Gives the exact mean, for p − 1 messages per rank and step. Spectral gap 1.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "dpsgd", topology="complete")

    Reference: Xiangru Lian, Ce Zhang, Huan Zhang, Cho-Jui Hsieh, Wei Zhang, Ji Liu, "Can decentralized algorithms
    outperform centralized algorithms? A case study for decentralized parallel stochastic gradient descent", 2017.
    """

    symmetric = complete = True

    def distances(self, step: int) -> range:
        return range(self.size)
