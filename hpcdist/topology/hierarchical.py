"""Hierarchical: the mean inside each node at even steps, rings across the nodes at odd ones."""

from __future__ import annotations

from typing import final

from hpcdist.errors import ConfigError
from hpcdist.topology.base import Topology, uniform


@final
class HierarchicalGraph(Topology):
    """A complete graph inside each node at even steps; rings across the nodes at odd ones.

    Even steps: the exact mean inside the node. Odd steps: rank k of each node averages with rank k of the nodes before
    and after it, among nodes with so many ranks; 2 messages per rank across nodes. On q nodes of equal size two steps
    do the same as one step of a ring of q ranks.

    Args:
        size: number of ranks.
        nodes: node of each rank, as `Communicator.nodes`.

    Raises:
        ConfigError: `nodes` does not have one entry for each rank.

    Reference: Bicheng Ying, Kun Yuan, Hanbin Hu, Yiming Chen, Wotao Yin, "BlueFog: make decentralized algorithms
    practical for optimization and deep learning", 2021, hierarchical neighbour all-reduce.
    """

    symmetric = True
    period = 2

    def __init__(self, size: int, *, nodes: tuple[int, ...]):
        super().__init__(size)
        if len(nodes) != size:
            raise ConfigError(f"nodes must be one node per rank, {size}; got {len(nodes)}. Give those of all ranks.")
        members: dict[int, list[int]] = {}
        for rank, node in enumerate(nodes):
            members.setdefault(node, []).append(rank)
        self._inside = [members[node] for node in nodes]
        self._internode = []
        for rank, own in enumerate(self._inside):
            k = own.index(rank)
            self._internode.append([ranks[k] for ranks in members.values() if len(ranks) > k])

    def in_neighbours(self, rank: int, step: int) -> dict[int, float]:
        if step % 2 == 0:
            return uniform(self._inside[rank])
        ring = self._internode[rank]
        place = ring.index(rank)
        return uniform((rank, ring[place - 1], ring[(place + 1) % len(ring)]))
