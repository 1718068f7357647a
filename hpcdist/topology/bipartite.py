"""Complete bipartite graph: every even rank averages with every odd rank."""

from __future__ import annotations

from typing import final

from hpcdist.topology.base import Topology


@final
class Bipartite(Topology):
    """Average even with odd ranks: the complete bipartite graph. AD-PSGD needs it: without odd cycles no deadlock.

    p is the number of ranks. Weights 1/(1 + ⌈p/2⌉) along each edge, the remainder for the rank itself; ⌊p/2⌋ or ⌈p/2⌉
    messages per rank and step. Spectral gap 4/(p + 2) if p is even, and 6/(p + 3) if p is odd and at least 7.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "dpsgd", topology="bipartite")

    Reference: Xiangru Lian, Wei Zhang, Ce Zhang, Ji Liu, "Asynchronous decentralized parallel stochastic gradient
    descent", 2018, section 3.3, for the graph; Lin Xiao, Stephen Boyd, "Fast linear iterations for distributed
    averaging", 2004, for the weights.
    """

    symmetric = True

    def in_neighbours(self, rank: int, step: int) -> dict[int, float]:
        others = range((rank + 1) % 2, self.size, 2)
        weight = 1 / (1 + (self.size + 1) // 2)
        row = dict.fromkeys(others, weight)
        return dict(sorted({**row, rank: 1 - sum(row.values())}.items()))
