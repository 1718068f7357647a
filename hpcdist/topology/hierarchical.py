"""Hierarchical graph: the mean inside each node at even steps, rings across nodes at odd steps."""

from __future__ import annotations

from typing import final

from hpcdist.errors import ConfigError
from hpcdist.topology.base import Topology, uniform


@final
class HierarchicalGraph(Topology):
    """Average inside each node at even steps, and across nodes at odd steps.

    Even steps: the exact mean of the node. Odd steps: local rank k averages with local rank k of the previous and the
    next node that has one; 2 messages per rank across nodes. On q nodes of equal size two steps equal one step of a
    ring of q ranks.

    Args:
        size: number of ranks.
        nodes: node of each rank, as `Communicator.nodes`; set by hpcdist.

    Raises:
        ConfigError: `nodes` does not have one entry for each rank.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "dpsgd", topology="hierarchical")

    Reference: Bicheng Ying, Kun Yuan, Hanbin Hu, Yiming Chen, Wotao Yin, "BlueFog: make decentralized algorithms
    practical for optimization and deep learning", 2021, hierarchical neighbour all-reduce.
    """

    symmetric = True
    period = 2

    def __init__(self, size: int, *, nodes: tuple[int, ...]):
        super().__init__(size)
        if len(nodes) != size:
            raise ConfigError(f"nodes must have {size} entries, one per rank; got {len(nodes)}. Pass comm.nodes.")
        members: dict[int, list[int]] = {}
        for rank, node in enumerate(nodes):
            members.setdefault(node, []).append(rank)
        self._inside = [members[node] for node in nodes]  # by rank: the ranks of its node
        self._internode = []  # by rank: the ranks with its local rank, over all nodes
        for rank, local_ranks in enumerate(self._inside):
            k = local_ranks.index(rank)
            self._internode.append([ranks[k] for ranks in members.values() if len(ranks) > k])

    def in_neighbours(self, rank: int, step: int) -> dict[int, float]:
        if step % 2 == 0:
            return uniform(self._inside[rank])
        ring = self._internode[rank]
        index = ring.index(rank)
        return uniform((rank, ring[index - 1], ring[(index + 1) % len(ring)]))
