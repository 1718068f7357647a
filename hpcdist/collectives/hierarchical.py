"""Hierarchical all-reduce: through shared memory inside each node, so that only n/g bytes per rank cross nodes."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import final

import torch
from torch import Tensor

from hpcdist.collectives.base import Algorithm, Cost, bounds, chunks, segment_count, sum_in_rank_order
from hpcdist.collectives.recursive_doubling import RecursiveDoubling
from hpcdist.collectives.ring import Ring
from hpcdist.comm.communicator import Communicator

SEGMENT_BYTES = 1 << 21  # three slots of it per rank in shared memory: small enough for 64 MiB of /dev/shm
SLOTS = 3
SHORT_BYTES = 1 << 15  # across nodes: up to here the number of steps matters more than the bytes


@final
class Hierarchical(Algorithm):
    """All-reduce inside nodes by shared memory, and across nodes by a ring or recursive doubling.

    Reduce-scatter in the node, all-reduce of each slice across nodes, all-gather in the node. The first g ranks of each
    node own one slice each, g being the smallest number of ranks on any node. The tensor passes through a
    shared-memory window in segments, with three slots in turn: segment i is collected from one slot while the next is
    reduced in another and the one after is copied into the third. So one barrier of the node per segment is enough.
    Bytes sent per rank across q nodes for n bytes: 2(n/g)(q-1)/q by a ring, (n/g) lg q by recursive doubling if slices
    are short. Bytes read from shared memory inside the node: up to 2n(g-1)/g.

    Reference: M. Cho, U. Finkler, D. Kung, H. Hunter, "BlueConnect: decomposing all-reduce for deep learning on
    heterogeneous network hierarchy", 2019.
    """

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        self._owners = min(Counter(comm.nodes).values())  # ranks of a node that own a slice
        traffic = comm.trace.traffic  # counts all transfers of the all-reduce
        self._node = comm.split(comm.nodes[comm.rank], traffic=traffic)
        self._internode = comm.split(self._node.rank if self._node.rank < self._owners else None, traffic=traffic)
        if self._internode is not None:
            self._ring, self._doubling = Ring(self._internode), RecursiveDoubling(self._internode)
        self._window = self._node.window(SLOTS * SEGMENT_BYTES, torch.uint8)
        self._turn = 0  # counts segments, across calls: other ranks may still read the last slot

    @staticmethod
    def suits(comm: Communicator) -> bool:
        return len(set(comm.nodes)) < comm.size

    def _sum(self, tensor: Tensor) -> None:
        """Before each barrier reduce segment i and publish segment i + 1; after it collect segment i: three slots."""
        segments = chunks(tensor, segment_count(tensor.nbytes, SEGMENT_BYTES))
        self._publish(segments[0], self._turn)
        self._node.barrier()
        for i, segment in enumerate(segments):
            if self._internode is not None:
                self._reduce(segment, self._turn)
            if i + 1 < len(segments):
                self._publish(segments[i + 1], self._turn + 1)
            self._node.barrier()
            self._collect(segment, self._turn)
            self._turn += 1

    def _slot(self, turn: int) -> int:
        return turn % SLOTS * SEGMENT_BYTES

    def _publish(self, segment: Tensor, turn: int) -> None:
        """Copy a segment into this rank's slot of the window, for the node's ranks to read."""
        start = self._slot(turn)
        self._window.local[start : start + segment.nbytes].copy_(segment.view(torch.uint8))

    def _slices(self, segment: Tensor) -> list[tuple[int, Tensor]]:
        """Return the owners' slices of a segment, each with its offset in a slot, in bytes."""
        cuts = bounds(segment.numel(), self._owners)
        return [(start * segment.itemsize, segment[start:end]) for start, end in itertools.pairwise(cuts)]

    def _reduce(self, segment: Tensor, turn: int) -> None:
        """Sum this rank's slice over the node, then across nodes, and write it to this rank's slot."""
        node = self._node
        offset, local = self._slices(segment)[node.rank]
        start = self._slot(turn) + offset

        def read(peer: int) -> Tensor:
            return self._window.read(peer, start, local.nbytes).view(local.dtype)

        if local.numel() == 0:
            return
        sum_in_rank_order(local, node.rank, node.size, read, lambda: self.inbox.empty_like(local, local.numel()))
        if self._internode is not None and self._internode.size > 1:
            (self._doubling if local.nbytes <= SHORT_BYTES else self._ring)(local)
        self._window.local[start : start + local.nbytes].copy_(local.view(torch.uint8))

    def _collect(self, segment: Tensor, turn: int) -> None:
        """Copy the other owners' reduced slices of a segment from their slots."""
        slices = self._slices(segment)
        for step in range(1, len(slices) + 1):  # start at the neighbour, so that ranks don't all read the same memory
            owner = (self._node.rank + step) % len(slices)
            offset, part = slices[owner]
            if owner != self._node.rank and part.numel() > 0:
                self._window.get(part.view(torch.uint8), owner, self._slot(turn) + offset)

    def close(self) -> None:
        self._window.close()
        if self._internode is not None:
            self._internode.close()
        self._node.close()

    @staticmethod
    def cost(n_bytes: float, size: int, ranks_per_node: int = 1) -> Cost:
        """Predict the cost, an upper bound: network latency and bandwidth are assumed inside nodes, too."""
        peers, slice_bytes = ranks_per_node - 1, n_bytes / ranks_per_node
        across_nodes = RecursiveDoubling if slice_bytes <= SHORT_BYTES else Ring
        steps, sent, added = across_nodes.cost(slice_bytes, size // ranks_per_node)
        # The slices of a node share its link to other nodes.
        sent = 2 * peers * slice_bytes + ranks_per_node * sent
        return Cost(4 * peers + steps, sent, peers * slice_bytes + added)
