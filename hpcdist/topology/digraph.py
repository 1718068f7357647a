"""A directed graph from the user's file, for push-sum."""

from __future__ import annotations

from pathlib import Path
from typing import final

from hpcdist.topology.base import Topology, uniform
from hpcdist.topology.graph import read_edges


@final
class Digraph(Topology):
    """A directed graph from a file. Each rank splits its values evenly among itself and the ranks it sends to.

    So columns of W sum to 1; rows need not.

    Args:
        size: number of ranks.
        path: file of edges, one `a b` per line: rank a sends to rank b. `#` starts a comment.

    Raises:
        ConfigError: the file breaks a rule, or a rank can't be reached from another one.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("edges.txt").write_text("0 1" + chr(10) + "1 0")
        >>> comm.barrier()
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "sgp", topology={"name": "digraph", "path": "edges.txt"})

    Reference: Mahmoud Assran, Nicolas Loizou, Nicolas Ballas, Mike Rabbat, "Stochastic gradient push for distributed
    deep learning", 2019, section 2.
    """

    symmetric = False
    doubly_stochastic = False

    def __init__(self, size: int, *, path: str | Path):
        super().__init__(size)
        edges = read_edges(path, size, directed=True)
        # Of W: by rank, the weights at the ranks that it sends to.
        self._columns = [uniform([rank, *(b for a, b in edges if a == rank)]) for rank in range(size)]

    def in_neighbours(self, rank: int, step: int) -> dict[int, float]:
        return {peer: column[rank] for peer, column in enumerate(self._columns) if rank in column}

    def out_neighbours(self, rank: int, step: int) -> dict[int, float]:
        return dict(self._columns[rank])
