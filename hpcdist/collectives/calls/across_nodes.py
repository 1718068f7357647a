"""Slots across nodes: ranks of a node meet in its memory, and one of them exchanges the rows with the other nodes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdist.collectives.base import TAG
from hpcdist.collectives.calls.prepared import remember
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.slots import LINE, GatheredRows, Slots

PACKET_BYTES = 1 << 16  # up to here the other ranks' rows travel with the note
SLOT_BYTES, ALL_BYTES = 1 << 20, 1 << 23  # of a rank's slot, and of the slots of all ranks, at most
HEAD = 8  # bytes of a packet before its rows: the note
DIFFER = -(1 << 63)  # the note of nodes that know that ranks differ
NOTHING = GatheredRows(np.zeros((0, 0), np.uint8))
Ranks = slice | list[int]


def slots_across_nodes(comm: Communicator) -> Slots | None:
    """Collective. Make slots of ranks on several nodes; None of virtual ranks, and where a rank may die."""
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

    A meeting is one of the ranks of each node, an exchange between the nodes' first ranks, which lead, and another
    meeting in each node. In the exchange every leader gets the rows of all nodes in lg q rounds, q being the number of
    nodes: in round i each hears from the leader 2^i nodes further what that one has heard. Rows that are too long for
    a packet follow once all have agreed.

    Args:
        comm: the ranks. Its account of traffic counts what leaders send.
        node: those of this node.
        inside: the slots of this node, with room for the rows of all ranks; None where it has one rank.
        n_bytes: of a row, at most.

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
        order = list(dict.fromkeys(nodes))
        self._leader_of = [order.index(number) for number in nodes]
        self._ranks_of = [[rank for rank in range(comm.size) if nodes[rank] == number] for number in order]
        self._outbox, self._inbox = (torch.zeros(HEAD + PACKET_BYTES, dtype=torch.uint8) for _ in range(2))
        self._fingerprint, self._heard = (box.numpy()[:HEAD].view(np.int64) for box in (self._outbox, self._inbox))
        self._rounds: dict[tuple[int, int | None], list[_Round]] = {}  # by the length of a row, and its source

    def synchronize(self, fingerprint: int, gathered: GatheredRows | None = None) -> bool:
        self.calls += 1
        with self._node.failures.collective:
            agree = self._inside is None or self._inside.synchronize(fingerprint)
            if self._leaders is not None:
                with self._leaders.failures.collective:
                    agree = self._exchange(self._leaders, fingerprint if agree else DIFFER, gathered or NOTHING)
            return agree if self._inside is None else self._inside.synchronize(int(agree or self._leaders is None))

    def _exchange(self, leaders: Communicator, fingerprint: int, gathered: GatheredRows) -> bool:
        """Show the other nodes the rows of this one, and get theirs; tell whether all have the same note.

        Who hears of another note says so in the rounds that follow, and so does who hears of that.
        """
        rows, source = gathered
        n_bytes = rows.shape[-1]
        if n_bytes * (len(rows) - 1 if source is None else 1) > PACKET_BYTES:
            if agree := self._exchange(leaders, fingerprint, NOTHING):
                for rank in range(self.size) if source is None else [source]:
                    leaders.broadcast(torch.from_numpy(rows[rank]), self._leader_of[rank])
            return agree
        known = self._rounds.get((n_bytes, source))
        if known is None:
            known = remember(self._rounds, (n_bytes, source), self._plan(leaders, n_bytes, source))
        self._fingerprint[0], heard, inbox = fingerprint, self._heard, self._inbox
        for one in known:
            if one.sent:
                one.outgoing[...] = rows[one.sent]
            leaders.sendrecv(one.packet, one.dest, inbox, one.source, TAG)
            if heard[0] != fingerprint:
                self._fingerprint[0] = DIFFER
            elif one.received:
                rows[one.received] = one.incoming
        return int(self._fingerprint[0]) == fingerprint != DIFFER

    def _plan(self, leaders: Communicator, n_bytes: int, source: int | None) -> list[_Round]:
        rounds, me, n_nodes, distance = [], leaders.rank, leaders.size, 1
        while distance < n_nodes:
            n_sent = min(distance, n_nodes - distance)
            sent, received = (
                [rank for node in range(start, start + n_sent) for rank in self._ranks_of[node % n_nodes]
                 if n_bytes and source in (None, rank)]
                for start in (me, me + distance)
            )  # fmt: skip
            outgoing = _rows_in(self._outbox, len(sent), n_bytes)
            incoming = _rows_in(self._inbox, len(received), n_bytes)
            packet = self._outbox[: HEAD + outgoing.nbytes]
            dest, heard = (me - distance) % n_nodes, (me + distance) % n_nodes
            rounds.append(_Round(dest, heard, _some(sent), _some(received), packet, outgoing, incoming))
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
    """A round of the leaders' exchange: whom it is with, and the ranks whose rows are sent and received."""

    dest: int
    source: int
    sent: Ranks
    received: Ranks
    packet: Tensor
    outgoing: np.ndarray  # shape (ranks sent, bytes of a row)
    incoming: np.ndarray


def _some(ranks: list[int]) -> Ranks:
    """Return what indexes these rows, as a slice where that does."""
    joined = ranks == list(range(ranks[0], ranks[0] + len(ranks))) if ranks else False
    return slice(ranks[0], ranks[-1] + 1) if joined else ranks


def _rows_in(box: Tensor, count: int, n_bytes: int) -> np.ndarray:
    return box.numpy()[HEAD : HEAD + count * n_bytes].reshape(count, n_bytes)
