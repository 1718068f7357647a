"""Slots across nodes: ranks of a node share its memory, and one rank per node exchanges rows with other nodes.

Row: what a rank publishes for a call; fingerprint: a hash of the call (see `comm/slots.py`). Packet: a message between
the ranks that exchange, the leaders: the sender's fingerprint, then the rows that it forwards.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdist.collectives.base import TAG
from hpcdist.collectives.calls.prepared import remember
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.slots import LINE, GatheredRows, Slots

PACKET_BYTES = 1 << 16  # up to this size other ranks' rows travel with the fingerprint
SLOT_BYTES, ALL_BYTES = 1 << 20, 1 << 23  # maximum size of a slot, and of all ranks' slots
HEAD = 8  # bytes of a packet's header: the fingerprint
DIFFER = -(1 << 63)  # sent instead of a fingerprint once a node knows that ranks differ
NOTHING = GatheredRows(np.zeros((0, 0), np.uint8))
Ranks = slice | list[int]


def slots_across_nodes(comm: Communicator) -> Slots | None:
    """Collective. Create slots across several nodes; None on virtual ranks, and if the job may survive deaths."""
    nodes = comm.nodes
    if len(set(nodes)) == 1 or comm.mpi is None or comm.failures.tolerant:
        return None
    n_bytes = max(LINE, min(SLOT_BYTES, ALL_BYTES // comm.size) // LINE * LINE)
    node = comm.split(nodes[comm.rank], traffic=comm.trace.traffic)
    inside = node.memory.slots(-(-comm.size * n_bytes // node.size // LINE) * LINE)
    if all(comm.gather(inside is not None or node.size == 1)):
        return SlotsAcrossNodes(comm, node, inside, n_bytes)
    if inside is not None:
        inside.close()
    node.close()
    return None


class SlotsAcrossNodes(Slots):
    """Collective. Slots of ranks on several nodes: each node has memory for the rows of all ranks.

    To synchronize, the ranks of each node synchronize, then the first ranks of the nodes, the leaders, exchange rows,
    then the ranks of each node synchronize again. With q nodes the exchange takes lg q rounds: in round i each leader
    receives from the leader 2^i nodes further all rows that it has so far. Rows too long for a packet are broadcast
    once all fingerprints are known to be equal.

    Args:
        comm: the ranks. Its traffic counts what leaders send.
        node: the ranks of this node.
        inside: the slots of this node, with room for the rows of all ranks; None if it has one rank.
        n_bytes: maximum length of a row.

    Reference: Jehoshua Bruck, Ching-Tien Ho, Shlomo Kipnis, Eli Upfal, Derrick Weathersby, "Efficient algorithms for
    all-to-all communications in multiport message-passing systems", 1997.
    """

    counted = False

    def __init__(self, comm: Communicator, node: Communicator, inside: Slots | None, n_bytes: int):
        memory = inside.tables if inside else torch.zeros(2, comm.size, n_bytes, dtype=torch.uint8)
        first, second = (table.reshape(-1)[: comm.size * n_bytes].view(comm.size, n_bytes) for table in memory)
        super().__init__(comm.rank, (first, second))
        self._node, self._inside = node, inside
        self._leaders = comm.split(0 if node.rank == 0 else None, traffic=comm.trace.traffic)
        nodes = comm.nodes
        order = list(dict.fromkeys(nodes))  # the nodes by their first ranks, as the leaders' ranks
        self._leader_of = [order.index(number) for number in nodes]
        self._ranks_of = [[rank for rank in range(comm.size) if nodes[rank] == number] for number in order]
        self._outbox, self._inbox = (torch.zeros(HEAD + PACKET_BYTES, dtype=torch.uint8) for _ in range(2))
        self._fingerprint, self._received = (box.numpy()[:HEAD].view(np.int64) for box in (self._outbox, self._inbox))
        self._rounds: dict[tuple[int, int | None], list[_Round]] = {}  # by the length of a row, and its source

    def synchronize(self, fingerprint: int, gathered: GatheredRows | None = None) -> bool:
        self.calls += 1
        with self._node.failures.collective:
            equal = self._inside is None or self._inside.synchronize(fingerprint)
            if self._leaders is not None:
                with self._leaders.failures.collective:
                    equal = self._exchange(self._leaders, fingerprint if equal else DIFFER, gathered or NOTHING)
            # The leader tells its node's ranks the result: they have the fingerprint 1, and it has 0 if ranks differ.
            return equal if self._inside is None else self._inside.synchronize(int(equal or self._leaders is None))

    def _exchange(self, leaders: Communicator, fingerprint: int, gathered: GatheredRows) -> bool:
        """Collective among leaders. Fill in other nodes' rows of `gathered`; return whether all fingerprints are equal.

        With a `source`, only that rank's row. Rows too long for a packet are broadcast after an exchange of
        fingerprints alone. A leader that receives another fingerprint, or DIFFER, sends DIFFER in the rounds after it.
        All leaders must make the same number of `sendrecv`s, even if their calls differ: so no round may be skipped.
        """
        rows, source = gathered
        n_bytes = rows.shape[-1]
        if n_bytes * (len(rows) - 1 if source is None else 1) > PACKET_BYTES:
            if equal := self._exchange(leaders, fingerprint, NOTHING):
                for rank in range(self.size) if source is None else [source]:
                    leaders.broadcast(torch.from_numpy(rows[rank]), self._leader_of[rank])
            return equal
        rounds = self._rounds.get((n_bytes, source))
        if rounds is None:
            rounds = remember(self._rounds, (n_bytes, source), self._plan(leaders, n_bytes, source))
        self._fingerprint[0], received, inbox = fingerprint, self._received, self._inbox
        for step in rounds:
            if step.sent:
                step.outgoing[...] = rows[step.sent]
            leaders.sendrecv(step.packet, step.dest, inbox, step.source, TAG)
            if received[0] != fingerprint:
                self._fingerprint[0] = DIFFER
            elif step.received:
                rows[step.received] = step.incoming
        return fingerprint != DIFFER and int(self._fingerprint[0]) == fingerprint

    def _plan(self, leaders: Communicator, n_bytes: int, source: int | None) -> list[_Round]:
        """Return the lg q rounds in which q nodes exchange rows of `n_bytes`, or only the row of `source`."""
        rounds, local_node, n_nodes, distance = [], leaders.rank, leaders.size, 1
        while distance < n_nodes:
            nodes_sent = min(distance, n_nodes - distance)
            sent, received = (
                [rank for node in range(start, start + nodes_sent) for rank in self._ranks_of[node % n_nodes]
                 if n_bytes and source in (None, rank)]
                for start in (local_node, local_node + distance)
            )  # fmt: skip
            outgoing = _rows_in(self._outbox, len(sent), n_bytes)
            incoming = _rows_in(self._inbox, len(received), n_bytes)
            packet = self._outbox[: HEAD + outgoing.nbytes]
            dest, origin = (local_node - distance) % n_nodes, (local_node + distance) % n_nodes
            rounds.append(_Round(dest, origin, _as_index(sent), _as_index(received), packet, outgoing, incoming))
            distance *= 2
        return rounds

    def close(self) -> None:
        super().close()
        if self._inside is not None:
            self._inside.close()
        if self._leaders is not None:
            self._leaders.close()
        self._node.close()


class _Round(NamedTuple):
    """A round of the leaders' exchange: destination and source node, and the ranks whose rows are sent and received."""

    dest: int
    source: int
    sent: Ranks
    received: Ranks
    packet: Tensor  # the part of the outbox to send
    outgoing: np.ndarray  # the rows in it, shape (ranks sent, bytes of a row)
    incoming: np.ndarray  # the rows in the inbox


def _as_index(ranks: list[int]) -> Ranks:
    """Return an index of these rows: a slice if they are consecutive."""
    consecutive = ranks == list(range(ranks[0], ranks[0] + len(ranks))) if ranks else False
    return slice(ranks[0], ranks[-1] + 1) if consecutive else ranks


def _rows_in(box: Tensor, count: int, n_bytes: int) -> np.ndarray:
    return box.numpy()[HEAD : HEAD + count * n_bytes].reshape(count, n_bytes)
