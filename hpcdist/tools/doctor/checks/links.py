"""The network between neighbouring nodes: latency and bandwidth of every link of a ring, compared with the median.

Every node is measured with the node before it and the node after it. That separates a slow cable from a slow node: if
only one link is slow, both of its nodes have another, fast link.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from statistics import median, median_high, median_low
from typing import NamedTuple

import torch
from torch import Tensor

from hpcdist.comm import network
from hpcdist.comm.communicator import Communicator
from hpcdist.tools.doctor import base
from hpcdist.tools.doctor.base import OK, WARNING, Finding, Nodes, Requirements

SLOW = 0.5  # slow: below this fraction of the nodes' median bandwidth
LATE, LATE_S = 3.0, 5e-4  # slow: above this multiple of the nodes' median latency, and by at least LATE_S
PINGS = 40
FIRST_BYTES, MAX_BYTES, GROWTH, MAX_MESSAGES = 1 << 14, 1 << 23, 4, 100
PAIR_S = 0.5  # time per link; a slow one gets fewer and shorter messages
MAX_SEQUENTIAL = 8  # with more links, those without a common node are measured concurrently
PING, TIME = 30_003, 30_004  # tags


class Link(NamedTuple):
    """Measured latency and bandwidth between nodes a and b."""

    a: int
    b: int
    latency_s: float
    bandwidth_bytes_s: float


class Slow(NamedTuple):
    """Slow nodes, slow links between nodes that are not slow, and the medians over all nodes."""

    nodes: dict[int, float]  # factor by which the node is slower
    links: list[Link]
    latency_s: float
    bandwidth_bytes_s: float


# --- measuring --------------------------------------------------------------------------------------------------------
def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Divide a ring's links into rounds whose links share no node; up to MAX_SEQUENTIAL links have a round each."""
    ring = [(i, (i + 1) % count) for i in range(count if count > 2 else count - 1)]
    if len(ring) <= MAX_SEQUENTIAL:
        return [[pair] for pair in ring]
    last = [ring[-1:]] if count % 2 else []  # an odd ring needs a third round
    even = ring[: count - count % 2]
    return [even[0::2], even[1::2], *last]


def measure(comm: Communicator, nodes: Nodes, required: Requirements) -> dict:
    """Collective. Measure the links, and list each node's networks: [interface, network, Mbit/s of its driver or 0].

    Links that seem slow are measured again, and the better values count: another job may have used the network.
    """
    by_node = base.gather_by_node(comm, nodes, networks)
    ring_rounds = rounds(len(nodes.names))
    links = _measure_rounds(comm, nodes, ring_rounds)
    slow = compare(links.values(), len(nodes.names)) if links else Slow({}, [], 0.0, 0.0)
    suspects = {pair for pair, link in links.items() if link in slow.links or set(pair) & set(slow.nodes)}
    for pair, repeated in _measure_rounds(
        comm, nodes, [[p for p in pairs if p in suspects] for pairs in ring_rounds]
    ).items():
        latency_s = min(links[pair].latency_s, repeated.latency_s)
        links[pair] = Link(*pair, latency_s, max(links[pair].bandwidth_bytes_s, repeated.bandwidth_bytes_s))
    return {"networks": by_node, "links": list(links.values())}


def _measure_rounds(
    comm: Communicator, nodes: Nodes, parts: list[list[tuple[int, int]]]
) -> dict[tuple[int, int], Link]:
    """Collective. Measure rounds of links (pairs of nodes, each once in a round); return links by pair on all ranks."""
    table: dict[tuple[int, int], Link] = {}
    for pairs in filter(None, parts):
        link: list = []  # of this rank; empty if it measures none
        for pair in pairs:
            ends = [nodes.leaders[node] for node in pair]
            if comm.rank in ends:
                link = [*pair, *_pair(comm, ends[1 - ends.index(comm.rank)])]
        try:
            measured = base.gather(comm, link)
        except base.Unanswered as error:  # neither end of a link replies: its messages are stuck
            stuck = [(nodes.leaders[a], nodes.leaders[b]) for a, b in pairs]
            stuck = [ends for ends in stuck if set(ends) <= set(error.ranks)]
            raise base.Unanswered(error.ranks, error.seconds, stuck) from error
        table |= {pair: Link(*measured[nodes.leaders[pair[0]]]) for pair in pairs}
    return table


def networks() -> list[list]:
    """Return [interface, network, Mbit/s] of each of this host's addresses, the fastest interface first."""
    return [[a.interface, str(a.ip.network), network.speed_mbit_s(a.interface)] for a in network.addresses()]


def _pair(comm: Communicator, peer: int) -> tuple[float, float]:
    """Measure for about PAIR_S. Return latency in s, and bytes/s per direction, both in use; the same at both ends."""
    out, into = torch.zeros(2), torch.zeros(2)
    _exchange(comm, peer, out, into)  # connects
    first_s = _longer_time(comm, peer, median(_exchange(comm, peer, out, into) for _ in range(3)))
    pings = max(1, min(PINGS, int(PAIR_S / max(first_s, 1e-9))))
    latency_s = _longer_time(comm, peer, median(_exchange(comm, peer, out, into) for _ in range(pings)))
    send, receive = torch.ones(MAX_BYTES // 4), torch.zeros(MAX_BYTES // 4)
    n_bytes, spent_s, best_bytes_s = FIRST_BYTES, 0.0, 0.0
    for _ in range(MAX_MESSAGES):
        count = n_bytes // 4
        last_s = _longer_time(comm, peer, _exchange(comm, peer, send[:count], receive[:count]))
        spent_s += last_s
        best_bytes_s = max(best_bytes_s, n_bytes / max(last_s, 1e-9))
        larger = min(GROWTH * n_bytes, MAX_BYTES)
        if spent_s + last_s * larger / n_bytes > PAIR_S:
            break
        if larger > n_bytes:
            n_bytes, best_bytes_s = larger, 0.0  # short messages may be sent in one burst, faster than the link
    return latency_s, best_bytes_s


def _exchange(comm: Communicator, peer: int, send: Tensor, receive: Tensor) -> float:
    start = comm.now()
    comm.sendrecv(send, peer, receive, peer, PING)
    return comm.now() - start


def _longer_time(comm: Communicator, peer: int, seconds: float) -> float:
    """Return the longer of both ends' times, so that both decide the same."""
    other = torch.empty(1, dtype=torch.float64)
    comm.sendrecv(torch.tensor([seconds], dtype=torch.float64), peer, other, peer, TIME)
    return max(seconds, float(other))


# --- judging ----------------------------------------------------------------------------------------------------------
def compare(links: Collection[Link], count: int) -> Slow:
    """Find the slow nodes and links.

    A node counts by the better of its links, compared with the median over the nodes; this is correct as long as most
    nodes have a good link.
    """
    bandwidth, latency = [0.0] * count, [float("inf")] * count
    for link in links:
        for node in link[:2]:
            bandwidth[node] = max(bandwidth[node], link.bandwidth_bytes_s)
            latency[node] = min(latency[node], link.latency_s)
    usual_bandwidth, usual_s = median_high(bandwidth), median_low(latency)  # of two middle values the better one

    def worse(bytes_s: float, latency_s: float) -> float:
        """Return how many times worse than the medians the worse of both values is; 0 if neither is slow."""
        late = latency_s > LATE * usual_s and latency_s > usual_s + LATE_S
        less = bytes_s < SLOW * usual_bandwidth
        return max(latency_s / usual_s if late else 0.0, usual_bandwidth / bytes_s if less else 0.0)

    slow_nodes = {node: times for node in range(count) if (times := worse(bandwidth[node], latency[node]))}
    healthy = [link for link in links if not {link.a, link.b} & set(slow_nodes)]
    slow_links = [link for link in healthy if worse(link.bandwidth_bytes_s, link.latency_s)]
    return Slow(slow_nodes, slow_links, usual_s, usual_bandwidth)


def judge(measured: dict, nodes: Nodes, required: Requirements) -> Iterator[Finding]:
    """Report each slow node and link, and the others in one line."""
    links = [Link(*row) for row in measured["links"]]
    if not links:
        yield Finding(OK, f"one node ({nodes}): no links to measure")
        return
    yield from _separate_networks(measured["networks"], nodes)
    slow = compare(links, len(nodes.names))
    usual = f"the nodes' median is {_figures(slow.latency_s, slow.bandwidth_bytes_s)}"
    for node, times in slow.nodes.items():
        name = nodes.names[node]
        each = [f"to {nodes.names[link.a + link.b - node]} {_figures(*link[2:])}" for link in links if node in link[:2]]
        text = f"{name} is slow: {', '.join(each)}; {usual}. Exclude it (--exclude={name}), and tell the site"
        yield Finding(WARNING, text, (name,), weight=times)
    for link in slow.links:
        ends = (nodes.names[link.a], nodes.names[link.b])
        text = f"the link {ends[0]}-{ends[1]} is slow, but not the links to other neighbours: {_figures(*link[2:])}; "
        yield Finding(WARNING, f"{text}{usual}. Exclude one of the two, and tell the site", ends)
    yield Finding(OK, _summary(links, slow, measured["networks"], nodes))


def _separate_networks(by_node: dict[str, list], nodes: Nodes) -> Iterator[Finding]:
    """Report nodes that share no network with the first one."""
    first = {network for _, network, _ in by_node[nodes.names[0]]}
    separate = [
        name for name in nodes.names if first and by_node[name] and not first & {row[1] for row in by_node[name]}
    ]
    if separate:
        text = f"{base.listed(separate)} share{'s' * (len(separate) == 1)} no network with {nodes.names[0]} "
        text += f"({base.listed(sorted(first))}): they reach each other through routers, if at all"
        yield Finding(WARNING, text, tuple(separate) if len(separate) == 1 else ())


def _summary(links: list[Link], slow: Slow, by_node: dict[str, list], nodes: Nodes) -> str:
    """Describe all links in one line: median, slowest link, fastest network that all nodes have."""
    common = [row for row in by_node[nodes.names[0]] if all(row[1] in [r[1] for r in by_node[n]] for n in nodes.names)]
    common_network = ""
    if common:
        interface, network, mbit_s = common[0]
        common_network = f"; fastest common network {interface} {network}" + f" ({mbit_s:g} Mbit/s)" * bool(mbit_s)
    if len(links) == 1:
        text = f"{nodes.names[0]}-{nodes.names[1]} {_figures(*links[0][2:])}: two nodes have nothing to compare with"
        return text + common_network
    slowest = min(links, key=lambda link: link.bandwidth_bytes_s)
    ends = f"{nodes.names[slowest.a]}-{nodes.names[slowest.b]}"
    text = f"{len(links)} links between neighbours, median {_figures(slow.latency_s, slow.bandwidth_bytes_s)}"
    return f"{text}; slowest {ends} {_figures(*slowest[2:])}{common_network}"


def _figures(latency_s: float, bandwidth_bytes_s: float) -> str:
    gbit_s = 8e-9 * bandwidth_bytes_s
    speed = f"{gbit_s:.1f} Gbit/s" if gbit_s >= 1 else f"{1e3 * gbit_s:.3g} Mbit/s"
    return f"{1e6 * latency_s:.0f} µs, {speed}"
