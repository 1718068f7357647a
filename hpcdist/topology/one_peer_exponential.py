"""One-peer exponential graph: one neighbour of the exponential graph per step, in turn."""

from __future__ import annotations

from typing import final

from hpcdist.topology.base import Circulant


@final
class OnePeerExponential(Circulant):
    """Send to one rank per step, at distance 1, then 2, 4, 8...: the one-peer exponential graph.

    At step s rank i of p sends to i + 2^(s mod t), t = ⌈lg p⌉; weights 1/2. If p is a power of two, any t consecutive
    steps give the exact mean; otherwise no number of steps does.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "sgp", topology="one_peer_exponential")

    Reference: Bicheng Ying, Kun Yuan, Yiming Chen, Hanbin Hu, Pan Pan, Wotao Yin, "Exponential graph is provably
    efficient for decentralized deep training", 2021, periodic exact averaging; Mahmoud Assran, Nicolas Loizou, Nicolas
    Ballas, Mike Rabbat, "Stochastic gradient push for distributed deep learning", 2019.
    """

    symmetric = False

    def __init__(self, size: int):
        super().__init__(size)
        self._peers = self.period = max(1, (size - 1).bit_length())

    def distances(self, step: int) -> tuple[int, ...]:
        return 0, 1 << step % self._peers
