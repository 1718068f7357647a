"""Findings on nodes and ranks that are absent, and on pairs of nodes that do not reach each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from hpcdist.tools.doctor.base import ERROR, WARNING, Finding, Nodes, Unanswered, counted, listed


def absent_nodes(names: Sequence[str], first: str, waited_s: float) -> Iterator[Finding]:
    """Name the nodes that did not come to the first one by TCP."""
    for name in names:
        text = f"{name} must come to {first} by TCP; it did not within {waited_s:g} s: it hangs, or can't reach {first}"
        yield Finding(WARNING, text, (name,))


def absent_ranks(
    hosts: Mapping[int, str], absent: Sequence[int], expected: Sequence[str], waited_s: float
) -> list[Finding]:
    """Name the ranks that did not answer; by node, where it is known which nodes are expected.

    Args:
        hosts: the hosts of the ranks that have answered.
    """
    ranks = f"rank{'s' * (len(absent) > 1)} {counted(absent)}"
    text = f"every rank must answer; got nothing from {ranks} within {waited_s:g} s"
    advice = "It has ended, is stopped, or can't be reached by the network that MPI uses"
    here = {host.partition(".")[0] for host in hosts.values()}
    names = [name for name in expected if name.partition(".")[0] not in here]
    if 0 not in hosts or not names:
        return [Finding(ERROR, f"{text}. {advice}")]
    return [Finding(ERROR, f"{text}, nor from any rank on {name}. {advice}", (name,)) for name in names]


def unreachable_pairs(pairs: Sequence[tuple[int, int]], nodes: Nodes, why: str) -> list[Finding]:
    """Name the pairs of nodes that pass each other nothing, and `why` one thinks so: a line for a node with several."""
    found, left = [], [tuple(nodes.names[node] for node in pair) for pair in pairs]
    while left:
        counts = Counter(name for pair in left for name in pair)
        worst = max(counts, key=lambda name: (counts[name], nodes.names.index(name)))
        ends = [pair for pair in left if worst in pair]
        left = [pair for pair in left if worst not in pair]
        if len(ends) == 1:
            text, whose, out = f"the link {'-'.join(ends[0])} passes nothing", ends[0], "one of the two"
        else:
            others = [name for pair in ends for name in pair if name != worst]
            text, whose, out = f"the links from {worst} to {listed(others)} pass nothing", (worst,), worst
        text += f": {why}, though all reach {nodes.names[0]}. Leave {out} out, and tell the site: look at "
        found.append(Finding(ERROR, f"{text}cables, routes and firewalls between them", whose, weight=len(ends)))
    return found


def unanswered(error: Unanswered, nodes: Nodes, stage: str) -> list[Finding]:
    """Name the ranks, by node, that stopped answering at this stage; of pairs that wait for each other, the link."""
    stuck = {rank for pair in error.pairs for rank in pair}
    why = f"its measurement did not end within {error.seconds:g} s"
    found = unreachable_pairs([(nodes.of[a], nodes.of[b]) for a, b in error.pairs], nodes, why)
    ranks = [rank for rank in error.ranks if rank not in stuck]
    for name in dict.fromkeys(nodes.name(rank) for rank in ranks):
        theirs = [rank for rank in ranks if nodes.name(rank) == name]
        text = f"{Unanswered(theirs, error.seconds)} All must answer at {stage!r}"
        found.append(Finding(ERROR, text, (name,) * (len(nodes.names) > 1)))
    return found
