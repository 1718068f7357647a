"""Open the windows of requests and replies: one slot per child in its parent's memory, filled by one-sided puts.

A child pushes a request by copying its tensors into its slot at each of its parents, drawing a ticket from the
parent's counter and raising its flag, the ticket (`client.py`). The parent takes the new flag with the lowest ticket,
and replies by writing into the child's own windows, where the child waits (`inbox.py`). So only a rank's own memory is
ever waited on, and a child that has a reply from every parent owns its slots again.

Requests and replies may be compressed (`codec.py`). Then slots have room for the longest message, and words beside them
say how long it is; no more than that travels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator, Put
from hpcdist.strategies.server.channel import Channel
from hpcdist.strategies.server.codec import Codec
from hpcdist.strategies.server.roles import Roles
from hpcdist.strategies.server.shards import Shard

COUNTER = 1  # words at the front of a parent's: the ticket drawn last
TICKET, KIND, WEIGHT, LENGTHS = 0, 1, 2, 3  # a slot's words; after the lengths the number of clocks, and the clocks
COUNT, CLOCK, BLOCKER, HELD_US, REPLY = 0, 1, 2, 3, 4  # a child's words for each parent; then lengths


class Slots:
    """Collective. Lay out the slots of all ranks with parents or children.

    Args:
        shards: what each server's requests and replies cover; an aggregator's cover all.
        like: flat tensors as long as a whole request, the same on all ranks, and values that all ranks have: compressed
            values are of what has changed since.
        names: how many flags say which parameters have a gradient.
        clocks: the most gradients that a request is the sum of.
        up, down: how requests and replies are compressed; None: not at all.
        values: how many hyper-parameters a request has.
    """

    def __init__(
        self,
        comm: Communicator,
        roles: Roles,
        shards: Mapping[int, Shard],
        like: Sequence[Tensor],
        names: int,
        clocks: int = 1,
        up: Codec | None = None,
        down: Codec | None = None,
        values: int = 0,
    ):
        self.comm, self.shards, self._roles, rank = comm, shards, roles, comm.rank
        self.parents, self.needed = roles.parents.get(rank, ()), roles.needed
        self._siblings = {parent: roles.children(parent) for parent in self.parents}
        self.children = roles.children(rank)
        count = len(self.children)

        def from_children(parent: int) -> list[tuple[int, Shard]]:
            return [(child, shards[parent]) for child in roles.children(parent)]

        def from_parents(child: int) -> list[tuple[int, Shard]]:
            return [(parent, shards[parent]) for parent in roles.parents.get(child, ())]

        self.up = Channel(comm, up, like, from_children, from_parents(rank), up=True)
        self.down = Channel(comm, down, like, from_parents, from_children(rank), up=False)
        self.count_at = LENGTHS + self.up.words
        self._words_per_slot = self.count_at + 1 + clocks
        self._words_per_reply = REPLY + self.down.words
        self.names = names
        self.used = comm.window(count * names, torch.bool)
        self.flags_of = [self.used.local[i * names : (i + 1) * names] for i in range(count)]
        self.values = comm.window(count * values, torch.float64)
        self.values_of = [self.values.local[i * values : (i + 1) * values] for i in range(count)]
        self.replies_at = self.slot_at(count)
        self.words = comm.window(self.replies_at + len(self.parents) * self._words_per_reply, torch.int64)
        words = self.words.local.numpy()  # the same memory; NumPy looks at a few words sooner than torch
        self.requests = words[COUNTER : self.replies_at].reshape(count, self._words_per_slot)
        self.tickets = self.requests[:, TICKET]
        self.replies = words[self.replies_at :].reshape(len(self.parents), self._words_per_reply)
        self.replied = self.replies[:, COUNT]

    def slot_at(self, slot: int) -> int:
        """Return where a slot's words begin in its parent's window."""
        return COUNTER + slot * self._words_per_slot

    def own_slot(self, parent: int) -> int:
        """Return the number of this rank's slot at a parent."""
        return self._siblings[parent].index(self.comm.rank)

    def reply_at(self, child: int) -> int:
        """Return where this rank's words lie in a child's window."""
        number = self._roles.parents[child].index(self.comm.rank)
        return self.slot_at(len(self._roles.children(child))) + number * self._words_per_reply

    def put(self, rank: int, at: int, *words: int) -> Put:
        """Return the put that writes these words into a rank's window, from there on."""
        return Put(self.words, torch.from_numpy(np.array(words, np.int64)), rank, at)  # sooner than torch.tensor

    def close(self) -> None:
        """Collective. Release the windows."""
        self.flags_of.clear()  # their memory goes
        self.values_of.clear()
        for opened in (self.up, self.down, self.used, self.values, self.words):
            opened.close()
