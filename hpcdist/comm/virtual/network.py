"""The network of the virtual cluster: links with a bandwidth, each for one transfer at a time, and a latency.

A transfer of n bytes from one rank to another at time t::

    depart  = max(t, outgoing link free)                        n / bandwidth on the sender's outgoing link
    enter   = max(depart + latency, incoming link free)         n / bandwidth on the receiver's incoming link
    arrival = enter + n / bandwidth

Cut-through: the first byte is forwarded immediately, so an uncontended transfer takes exactly latency + n / bandwidth.
Transfers queue at a link in the order of arrival. The ranks of a node share its outgoing and its incoming link to other
nodes (one rank per node unless `ranks_per_node` is set); inside a node each rank has one pair of links. A message
of a rank to itself takes no time.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NamedTuple

from hpcdist.comm.virtual.compute import at_least_0, require


@dataclass(frozen=True)
class Network:
    """The latency and bandwidth of every link, and the number of ranks on each node.

    Args:
        latency_s: seconds from the first byte's departure to its arrival.
        bandwidth_bytes_s: bytes per second of a link; `math.inf` for a network of latency only.
        ranks_per_node: ranks 0..k-1 are on node 0, the next k on node 1...; None: one rank per node.
        intra_latency_s, intra_bandwidth_bytes_s: the same between ranks of one node; None: as between nodes.

    Example:
        >>> from hpcdist.comm.virtual import Network, run_virtual
        >>> network = Network(latency_s=1e-6, bandwidth_bytes_s=1e9, ranks_per_node=4)
        >>> network.slowest(network.nodes(size=8))
        (1e-06, 1000000000.0)
    """

    latency_s: float
    bandwidth_bytes_s: float
    ranks_per_node: int | None = None
    intra_latency_s: float | None = None
    intra_bandwidth_bytes_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("latency_s", "intra_latency_s"):
            value = getattr(self, name)
            require(_absent(name, value) or at_least_0(value), name, "a finite number of at least 0", value)
        for name in ("bandwidth_bytes_s", "intra_bandwidth_bytes_s"):
            value = getattr(self, name)
            holds = _absent(name, value) or (isinstance(value, Real) and float(value) > 0)
            require(holds, name, "a number above 0 (math.inf for no limit)", value)
        k = self.ranks_per_node
        require(
            k is None or (isinstance(k, Integral) and k >= 1), "ranks_per_node", "an integer of at least 1, or None", k
        )

    def slowest(self, nodes: Collection[int]) -> tuple[float, float]:
        """Return the latency and bandwidth of the slowest link among ranks on these nodes."""
        latency_s, bandwidth_bytes_s = self.latency_s, self.bandwidth_bytes_s
        if len(set(nodes)) == 1:
            latency_s = latency_s if self.intra_latency_s is None else self.intra_latency_s
            if self.intra_bandwidth_bytes_s is not None:
                bandwidth_bytes_s = self.intra_bandwidth_bytes_s
        return float(latency_s), float(bandwidth_bytes_s)

    def nodes(self, size: int) -> tuple[int, ...]:
        """Return the node index of each of `size` ranks."""
        return tuple(rank // (self.ranks_per_node or 1) for rank in range(size))


def _absent(name: str, value: object) -> bool:
    return value is None and name.startswith("intra")


class OneWayLink:
    """One direction of a link, for one transfer at a time."""

    def __init__(self) -> None:
        self.free_s = 0.0

    def reserve(self, at_s: float, duration_s: float) -> tuple[float, float]:
        """Reserve the link for a transfer that reaches it at `at_s`; return its start and end times."""
        start_s = max(at_s, self.free_s)
        self.free_s = start_s + duration_s
        return start_s, self.free_s


class Path(NamedTuple):
    """The latency and links from one rank to another."""

    latency_s: float
    bandwidth_bytes_s: float
    out: OneWayLink
    into: OneWayLink

    def duration_s(self, n_bytes: int) -> float:
        return n_bytes / self.bandwidth_bytes_s


class Wiring:
    """The links between all ranks of a run, by world rank."""

    def __init__(self, network: Network, size: int):
        self.network = network
        self._inter, self._intra = network.slowest((0, 1)), network.slowest((0,))  # (latency, bandwidth) of links
        self.nodes = network.nodes(size)
        self._inter_links = [(OneWayLink(), OneWayLink()) for _ in range(max(self.nodes) + 1)]
        self._intra_links = [(OneWayLink(), OneWayLink()) for _ in range(size)]
        self._to_self = Path(0.0, math.inf, OneWayLink(), OneWayLink())

    def path(self, source: int, dest: int) -> Path:
        """Return the latency and the links from rank `source` to rank `dest`."""
        if source == dest:
            return self._to_self
        source_node, dest_node = self.nodes[source], self.nodes[dest]
        if source_node == dest_node:
            return Path(*self._intra, self._intra_links[source][0], self._intra_links[dest][1])
        return Path(*self._inter, self._inter_links[source_node][0], self._inter_links[dest_node][1])
