"""Push requests to this rank's parents, and wait for their replies."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpcdist.comm.communicator import Put
from hpcdist.errors import DeadlineError, RankFailedError
from hpcdist.strategies.server.liveness import CHECK_S
from hpcdist.strategies.server.requests import ReplyHead
from hpcdist.strategies.server.slots import BLOCKER, CLOCK, HELD_US, KIND, REPLY, TICKET, Slots


class Client:
    """Push a child's requests, one at a time.

    Attributes:
        pushed: how many requests so far.
        meanwhile: blocks until a request or a reply has come, and deals with requests: for a rank that is a server too.
    """

    def __init__(self, slots: Slots):
        self._slots, self._comm = slots, slots.comm
        self._places = [(p, slots.own_slot(p), slots.slot_at(slots.own_slot(p))) for p in slots.parents]
        self._awaited = f"the reply of server rank {', '.join(map(str, slots.parents))}"
        self._last_used: Tensor | None = None  # what lies in this rank's slots
        self._last_values: Sequence[float] = ()
        self.pushed = 0
        self._decoded = 0  # replies to so many requests have been
        self.meanwhile: Callable[[], None] | None = None

    def push(
        self,
        kind: int,
        clocks: Sequence[Sequence[int]] | None = None,
        tensors: Sequence[Tensor] = (),
        used: Tensor | None = None,
        weight: float = 0.0,
        values: Sequence[float] = (),
    ) -> None:
        """Copy a request into this rank's slot at every parent. All must have replied to the last one.

        Args:
            clocks: for each parent those of the gradients in the request.
            tensors: the whole request, of which each parent gets its shard; none leaves what lies in the slots.
            values: hyper-parameters; none leaves those that lie in the slots.
        """
        slots = self._slots
        if used is not None and self._last_used is not None and torch.equal(used, self._last_used):
            used = None
        new_values = torch.tensor(values, dtype=torch.float64) if values and values != self._last_values else None
        puts = []
        for i, (parent, slot, at) in enumerate(self._places):
            found, lengths = slots.up.puts(parent, slots.shards[parent].of(tensors) if tensors else ())
            puts += found
            if used is not None:
                puts.append(Put(slots.used, used, parent, slot * slots.names))
            if new_values is not None:
                puts.append(Put(slots.values, new_values, parent, slot * len(values)))
            stamps = () if clocks is None else clocks[i]
            weight_bits = struct.unpack("q", struct.pack("d", weight))
            puts.append(slots.put(parent, at + KIND, kind, *weight_bits, *lengths, len(stamps), *stamps))
        self._comm.put_all(puts)
        self.pushed += 1
        self._last_used = self._last_used if used is None else used.clone()
        self._last_values = values or self._last_values
        tickets = [(parent, at, slots.words.fetch_add(1, parent) + 1) for parent, _, at in self._places]
        self._comm.put_all([slots.put(parent, at + TICKET, ticket) for parent, at, ticket in tickets])

    def replied(self) -> bool:
        """Return whether every parent has replied to this rank's last request."""
        counts = self._slots.replied.tolist()
        return counts == [self.pushed] * len(counts)

    def missing(self) -> list[int]:
        """Return the parents that have not replied."""
        counts = self._slots.replied.tolist()
        return [p for p, count in zip(self._slots.parents, counts, strict=True) if count < self.pushed]

    def wait(self) -> list[ReplyHead]:
        """Block until every parent has replied; `slots.down.arrived` then has the tensors, until the next push.

        Raises:
            RankFailedError: a server has died.
            DeadlineError: names the servers.
        """
        while not self.replied():
            (self.meanwhile or self._block)()
        down, replies = self._slots.down, self._slots.replies
        if down.words and self._decoded < self.pushed:
            self._decoded = self.pushed
            for parent, words in zip(self._slots.parents, replies):
                list(down.read(parent, words[REPLY:].tolist()))
        return [ReplyHead(w[CLOCK], w[BLOCKER], w[HELD_US] * 1e-6) for w in replies.tolist()]

    def _block(self) -> None:
        """Block until every parent has replied."""
        if self._comm.tolerant:
            self._look_for_deaths()
        if not self.replied():
            self._slots.words.wait(lambda _: self.replied(), offset=self._slots.replies_at, what=self._awaited)

    def _look_for_deaths(self) -> None:
        """Block until every parent has replied, or the deadline has passed; raise an error if a server has died."""
        until = self._comm.now() + self._comm.deadline_s
        while not self._wait_for(min(CHECK_S, until - self._comm.now())):
            # Not parents alone: MPI tells of a rank that was killed, not of an aggregator that ended because of it.
            for server in set(self._slots.needed) & set(self._comm.failed()):
                raise RankFailedError(
                    f"server rank {server} has died, and its part of the parameters and of the optimiser's state with "
                    "it. Resume from the last checkpoint."
                )
            if self._comm.now() > until:
                break

    def _wait_for(self, timeout_s: float) -> bool:
        """Block until every parent has replied, but no longer than that; return whether they have."""
        try:
            at, limit_s = self._slots.replies_at, max(0.0, timeout_s)
            self._slots.words.wait(lambda _: self.replied(), offset=at, deadline_s=limit_s)
        except DeadlineError:
            return self.replied()
        return True
