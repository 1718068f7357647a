"""The user's own graphs: files with an edge per line."""

from __future__ import annotations

from pathlib import Path

import networkx as nx

from hpcdist.errors import ConfigError


def read_edges(path: str | Path, size: int, directed: bool) -> set[tuple[int, int]]:
    """Read the edges (a, b) of a file; both directions of each one unless `directed`.

    A line is `a b`: two ranks; `#` begins a comment. An edge given twice counts once.

    Raises:
        ConfigError: the file can't be read, a line breaks these rules, or the edges do not connect all ranks.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
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
    words = text.split()
    if len(words) != 2 or not all(word.isdecimal() and int(word) < size for word in words):
        raise ConfigError(f"{where} must be two ranks from 0 to {size - 1}; got {text!r}. Write 'a b' for each edge.")
    a, b = map(int, words)
    if a == b:
        raise ConfigError(f"{where} must join two different ranks; got {text!r}. Its own weight is implied.")
    return a, b


def _check_connected(path: Path, edges: set[tuple[int, int]], size: int, directed: bool) -> None:
    graph = nx.DiGraph(edges)
    graph.add_nodes_from(range(size))
    (joined,) = (part for part in nx.strongly_connected_components(graph) if 0 in part)
    if len(joined) < size:
        cut_off = min(set(range(size)) - joined)
        way = "to and from" if directed else "to"
        raise ConfigError(
            f"the edges in {path} must connect all {size} ranks; got no way from rank 0 {way} rank {cut_off}. Add some."
        )
