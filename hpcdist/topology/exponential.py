"""Static exponential graph: each rank sends to the ranks at distances 1, 2, 4, 8..."""

from __future__ import annotations

from typing import final

from hpcdist.topology.base import Circulant


@final
class ExponentialGraph(Circulant):
    """The static exponential graph: rank i sends to i + 2ᵏ for all 2ᵏ < p, with weights 1/(1 + t).

    Messages per rank: t = ⌈lg p⌉.

    Spectral gap 2/(1 + t) if p is even, more if p is odd.

    Reference: Bicheng Ying, Kun Yuan, Yiming Chen, Hanbin Hu, Pan Pan, Wotao Yin, "Exponential graph is provably
    efficient for decentralized deep training", 2021, spectral gap of the static graph.
    """

    symmetric = False

    def distances(self, step: int) -> tuple[int, ...]:
        return 0, *(1 << k for k in range((self.size - 1).bit_length()))
