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
    """A reduce-scatter in the node, an all-reduce of each slice across the nodes, an all-gather in the node.

    The first g ranks of each node own a slice each, g being the fewest ranks on any node. The tensor passes through a
    shared-memory window in segments, in three slots in turn: while segment i is collected from one slot, the next is
    reduced in another, and the one after is copied into the third; so one barrier of the node per segment suffices.
    Bytes sent per rank across q nodes: 2(n/g)(q-1)/q by a ring, (n/g) lg q by recursive doubling where slices are
    short. Inside the node they are read from shared memory: up to 2n(g-1)/g.

    Reference: M. Cho, U. Finkler, D. Kung, H. Hunter, "BlueConnect: decomposing all-reduce for deep learning on
    heterogeneous network hierarchy", 2019.
    """

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        self._owners = min(Counter(comm.nodes).values())
        account = comm.trace.traffic  # one for all that the all-reduce moves
        self._node = comm.split(comm.nodes[comm.rank], traffic=account)
        self._internode = comm.split(self._node.rank if self._node.rank < self._owners else None, traffic=account)
        if self._internode is not None:
            self._ring, self._doubling = Ring(self._internode), RecursiveDoubling(self._internode)
        self._window = self._node.window(SLOTS * SEGMENT_BYTES, torch.uint8)
        self._turn = 0  # slots go on in turn from call to call, as others may still collect from the last one

    @staticmethod
    def suits(comm: Communicator) -> bool:
        return len(set(comm.nodes)) < comm.size

    def _sum(self, tensor: Tensor) -> None:
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
        start = self._slot(turn)
        self._window.local[start : start + segment.nbytes].copy_(segment.view(torch.uint8))

    def _slices(self, segment: Tensor) -> list[tuple[int, Tensor]]:
        """List the owners' slices of a segment, each with its offset in a slot, in bytes."""
        cuts = bounds(segment.numel(), self._owners)
        return [(start * segment.itemsize, segment[start:end]) for start, end in itertools.pairwise(cuts)]

    def _reduce(self, segment: Tensor, turn: int) -> None:
        """Sum this owner's slice over the node, then over the nodes, and leave it in the owner's slot."""
        node = self._node
        offset, own = self._slices(segment)[node.rank]
        start = self._slot(turn) + offset

        def read(peer: int) -> Tensor:
            return self._window.read(peer, start, own.nbytes).view(own.dtype)

        if own.numel() == 0:
            return
        sum_in_rank_order(own, node.rank, node.size, read, lambda: self.inbox.like(own, own.numel()))
        if self._internode is not None and self._internode.size > 1:
            (self._doubling if own.nbytes <= SHORT_BYTES else self._ring)(own)
        self._window.local[start : start + own.nbytes].copy_(own.view(torch.uint8))

    def _collect(self, segment: Tensor, turn: int) -> None:
        slices = self._slices(segment)
        for step in range(1, len(slices) + 1):  # the neighbour's first, so that not all read the same memory at once
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
        """Predict the cost, inside nodes too at the network's latency and bandwidth: an upper bound."""
        peers, slice_bytes = ranks_per_node - 1, n_bytes / ranks_per_node
        between = RecursiveDoubling if slice_bytes <= SHORT_BYTES else Ring
        steps, sent, added = between.cost(slice_bytes, size // ranks_per_node)
        # The slices of a node share its link to the others.
        sent = 2 * peers * slice_bytes + ranks_per_node * sent
        return Cost(4 * peers + steps, sent, peers * slice_bytes + added)
