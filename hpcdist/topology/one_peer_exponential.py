"""One-peer exponential graph: the neighbours of the exponential graph, one in each step."""

from __future__ import annotations

from typing import final

from hpcdist.topology.base import Circulant


@final
class OnePeerExponential(Circulant):
    """The one-peer exponential graph: at step s rank i sends to i + 2^(s mod t), t = ⌈lg p⌉; weights 1/2.

    One message per rank and step.

    If p is a power of two, any t steps in a row give the exact mean; otherwise no number of steps does.

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
