"""Static exponential graph: each rank sends to the ranks at distances 1, 2, 4, 8..."""

from __future__ import annotations

from typing import final

from hpcdist.topology.base import Circulant


@final
class ExponentialGraph(Circulant):
    """Send to the ranks at distances 1, 2, 4, 8... of p ranks at every step: the static exponential graph.

    Messages per rank and step: t = ⌈lg p⌉. Weights 1/(1 + t). Spectral gap 2/(1 + t) if p is even, more if p is odd.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "sgp", topology="exponential")

    Reference: Bicheng Ying, Kun Yuan, Yiming Chen, Hanbin Hu, Pan Pan, Wotao Yin, "Exponential graph is provably
    efficient for decentralized deep training", 2021, spectral gap of the static graph.
    """

    symmetric = False

    def distances(self, step: int) -> tuple[int, ...]:
        return 0, *(1 << k for k in range((self.size - 1).bit_length()))
