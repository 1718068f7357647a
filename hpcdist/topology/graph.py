"""An undirected graph from the user's file, with Metropolis-Hastings weights."""

from __future__ import annotations

from pathlib import Path
from typing import final

import networkx as nx

from hpcdist.errors import ConfigError
from hpcdist.records import read_bounded
from hpcdist.topology.base import Topology


@final
class Graph(Topology):
    """An undirected graph from a file, with weights Wᵢⱼ = 1/(1 + max(dᵢ, dⱼ)) for dᵢ neighbours of rank i.

    The weight Wᵢᵢ is 1 minus the sum of the row. Messages of rank i per step: dᵢ.

    Args:
        size: number of ranks.
        path: file of edges, one `a b` per line; `#` starts a comment.

    Raises:
        ConfigError: the file breaks a rule, or a rank can't be reached.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("edges.txt").write_text("0 1")
        >>> comm.barrier()
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "dpsgd", topology={"name": "graph", "path": "edges.txt"})

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
        for rank, neighbours in enumerate(peers):
            row = {peer: 1 / (1 + max(len(neighbours), len(peers[peer]))) for peer in neighbours}
            self._rows.append(dict(sorted({**row, rank: 1 - sum(row.values())}.items())))

    def in_neighbours(self, rank: int, step: int) -> dict[int, float]:
        return dict(self._rows[rank])


def read_edges(path: str | Path, size: int, directed: bool) -> set[tuple[int, int]]:
    """Read the edges (a, b) of a file, in both directions unless `directed`.

    Each line holds two ranks, `a b`; `#` starts a comment. Edges may repeat.

    Raises:
        ConfigError: the file can't be read, a line breaks these rules, or the edges do not connect all ranks.
    """
    path = Path(path)
    try:
        lines = read_bounded(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"path must be a text file with an edge per line; got {path}: {error}.") from error
    edges = set()
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if text:
            edge = _edge(f"{path}, line {number}", text, size)
            edges |= {edge} if directed else {edge, edge[::-1]}
    _check_connected(path, edges, size, directed)
    return edges


def _edge(where: str, text: str, size: int) -> tuple[int, int]:
    """Parse one line, `a b`; raise ConfigError if it is not a valid edge."""
    tokens = text.split()
    if len(tokens) != 2 or not all(token.isdecimal() and int(token) < size for token in tokens):
        raise ConfigError(f"{where} must be two ranks from 0 to {size - 1}; got {text!r}. Write 'a b' for each edge.")
    a, b = map(int, tokens)
    if a == b:
        raise ConfigError(f"{where} must connect two different ranks; got {text!r}. Remove it: Wᵢᵢ is implied.")
    return a, b


def _check_connected(path: Path, edges: set[tuple[int, int]], size: int, directed: bool) -> None:
    """Raise ConfigError if a rank can't be reached from another one; undirected edges are there in both directions."""
    graph = nx.DiGraph(edges)
    graph.add_nodes_from(range(size))
    (connected,) = (part for part in nx.strongly_connected_components(graph) if 0 in part)
    if len(connected) < size:
        cut_off, path_to = min(set(range(size)) - connected), "to and from" if directed else "to"
        raise ConfigError(
            f"edges in {path} must connect all {size} ranks; got no path from rank 0 {path_to} rank {cut_off}. Add it."
        )
