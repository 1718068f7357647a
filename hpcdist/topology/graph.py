"""The user's own graph, with Metropolis-Hastings weights."""

from __future__ import annotations

from pathlib import Path
from typing import final

from hpcdist.topology.base import Topology
from hpcdist.topology.graphs.edges import read_edges


@final
class Graph(Topology):
    """An undirected graph from a file, with weights Wᵢⱼ = 1/(1 + max(dᵢ, dⱼ)) for degrees d.

    The rest of a row is the rank's own weight. Messages of rank i: dᵢ.

    Args:
        size: number of ranks.
        path: file of edges, `a b` per line, either way round; `#` begins a comment.

    Raises:
        ConfigError: the file breaks a rule, or a rank can't be reached.

    Reference: Lin Xiao, Stephen Boyd, "Fast linear iterations for distributed averaging", 2004, local-degree
    weights; Lin Xiao, Stephen Boyd, Sanjay Lall, "A scheme for robust distributed sensor fusion based on average
    consensus", 2005, for the 1 added.
    """

    symmetric = True

    def __init__(self, size: int, *, path: str | Path):
        super().__init__(size)
        peers: list[list[int]] = [[] for _ in range(size)]
        for a, b in sorted(read_edges(path, size, directed=False)):
            peers[a].append(b)
        self._rows = []
        for rank, own in enumerate(peers):
            row = {peer: 1 / (1 + max(len(own), len(peers[peer]))) for peer in own}
            self._rows.append(dict(sorted({**row, rank: 1 - sum(row.values())}.items())))

    def in_neighbours(self, rank: int, step: int) -> dict[int, float]:
        return dict(self._rows[rank])
