"""Connect children and parents by requests and replies: one slot per child in its parent's memory.

A child (a worker, say) pushes a request by one-sided puts: it copies its tensors into its slot at each of its parents
(its servers), draws a ticket from the parent's counter, and raises its flag, the ticket. The parent takes the new flag
with the lowest ticket, and replies by writing into the child's own windows, where the child waits. So a rank only ever
waits on its own memory, and a child that has a reply from every parent owns its slots again.

Requests and replies may be compressed (`codec.py`). Then slots have room for the longest message, and words beside them
say how long the message is; no more than that travels.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator, Put
from hpcdist.errors import DeadlineError, RankFailedError
from hpcdist.strategies.server.placement import Roles, Shard
from hpcdist.strategies.server.slots import Ends, OpenSlots, TensorSlots

# Kinds of requests: a gradient, or a sum of weighted ones, whose reply brings parameters; a push without; a fetch of
# parameters without a gradient; the end of a period.
GRADIENT, SUM, PUSH, FETCH, PAUSE = 1, 2, 3, 4, 5
NOBODY = -1
CHECK_S = 0.5  # how often a rank that waits looks for ranks that died


@dataclass(eq=False)
class ServerRequest:
    """A request to a server, in its slot. `tensors` and `used` are views that stay valid until the reply.

    `clocks` has one entry per gradient that the tensors are the sum of, `weight` is the sum of their weights, `values`
    are the hyper-parameters of the worker, float64.
    Compressed gradients are decoded as `tensors` is gone through, once, into memory that all requests share.
    The server sets the other fields while it holds the request.
    """

    source: int
    kind: int
    weight: float
    clocks: tuple[int, ...]
    tensors: Iterable[Tensor] = field(repr=False, default=())
    used: Tensor = field(repr=False, default_factory=lambda: torch.empty(0, dtype=torch.bool))
    values: Tensor = field(repr=False, default_factory=lambda: torch.empty(0, dtype=torch.float64))
    since_s: float = 0.0  # when the server began to deal with it
    added: bool = False  # to the sum of the next update; so is what has no gradient to add
    applied: bool = False  # an update, or a sum that was passed on, has taken all gradients up to this one
    blocker: int = NOBODY  # the rank it waits for


class Reply(NamedTuple):
    """Let the child of a request go on, with this shard's `tensors` (none: nothing new) and `clock`.

    The parent has held the reply back for `held_s` seconds because of the rank `blocker`.
    """

    request: ServerRequest
    clock: int
    tensors: Sequence[Tensor] = ()
    blocker: int = NOBODY
    held_s: float = 0.0


class Replies(NamedTuple):
    """The clock of each parent, and for how many seconds replies were held back because of which rank."""

    clocks: list[int]
    waited_for: dict[int, float]


WIDE = torch.float64  # of values
_NOTHING = torch.empty(0)
COUNTER = 1  # words at the front of a parent's: the ticket drawn last
TICKET, KIND, WEIGHT, LENGTHS = 0, 1, 2, 3  # a slot's words; after the lengths the number of clocks, and the clocks
COUNT, CLOCK, BLOCKER, HELD_US, REPLY = 0, 1, 2, 3, 4  # a child's words for each parent; then lengths
Covers = Callable[[int, int], Shard]  # from a child and a parent to the shard that goes between them


class RequestChannel:
    """Collective. Lay out the slots of all ranks with parents or children.

    Args:
        shards: what each server's requests and replies cover; an aggregator's cover all.
        like: flat tensors as long as a whole request, the same on all ranks, and values that all ranks have: compressed
            values are of what has changed since.
        names: how many flags say which parameters have a gradient.
        clocks: the most gradients that a request is the sum of.
        up, down: open the slots of requests and of replies; `CodedSlots` of a codec compresses them.
        values: how many numbers a request has at most, such as hyper-parameters.
        replies: flat tensors as long as a reply of one parent; None: a reply covers what the request does.
        bare: the children whose requests have no tensors.

    Attributes:
        client: pushes this rank's requests to its parents.
        inbox: takes the requests of its children.
        up, down: the tensors of requests and of replies.
        along: flags and values that go along with requests.
    """

    def __init__(
        self,
        comm: Communicator,
        roles: Roles,
        shards: Mapping[int, Shard],
        like: Sequence[Tensor],
        names: int,
        clocks: int = 1,
        up: OpenSlots = TensorSlots,
        down: OpenSlots = TensorSlots,
        values: int = 0,
        replies: Sequence[Tensor] | None = None,
        bare: Collection[int] = (),
    ):
        self.comm, self.shards, self.roles, rank = comm, shards, roles, comm.rank
        self.parents, self.children = roles.parents.get(rank, ()), roles.children(rank)
        count, stamps = len(self.children), [torch.zeros(names, dtype=torch.bool), torch.zeros(values, dtype=WIDE)]

        def asked(child: int, parent: int) -> Shard:
            return Shard(((0, 0),) * len(like)) if child in bare else shards[parent]

        def replied(child: int, parent: int) -> Shard:
            return shards[parent] if replies is None else Shard(tuple((0, flat.numel()) for flat in replies))

        def stamped(child: int, parent: int) -> Shard:
            return Shard(((0, names), (0, values)))

        def from_children(parent: int, covers: Covers) -> Ends:
            return [(child, covers(child, parent)) for child in roles.children(parent)]

        def from_parents(child: int, covers: Covers) -> Ends:
            return [(parent, covers(child, parent)) for parent in roles.parents.get(child, ())]

        self.up = up(comm, like, partial(from_children, covers=asked), from_parents(rank, asked))
        answers = like if replies is None else replies
        self.down = down(comm, answers, partial(from_parents, covers=replied), from_children(rank, replied))
        self.count_at = LENGTHS + self.up.words
        self._words_per_slot = self.count_at + 1 + clocks
        self._words_per_reply = REPLY + self.down.words
        self.along = TensorSlots(comm, stamps, partial(from_children, covers=stamped), from_parents(rank, stamped))
        self.replies_at = self.slot_at(count)
        self.words = comm.window(self.replies_at + len(self.parents) * self._words_per_reply, torch.int64)
        words = self.words.local.numpy()  # the same memory; NumPy looks at a few words sooner than torch
        self.requests = words[COUNTER : self.replies_at].reshape(count, self._words_per_slot)
        self.tickets = self.requests[:, TICKET]
        self.replies = words[self.replies_at :].reshape(len(self.parents), self._words_per_reply)
        self.replied = self.replies[:, COUNT]
        self.client = Client(self)
        self.inbox = Inbox(self, self.client)

    def slot_at(self, slot: int) -> int:
        """Return where a slot's words begin in its parent's window."""
        return COUNTER + slot * self._words_per_slot

    def reply_at(self, child: int) -> int:
        """Return where this rank's words lie in a child's window."""
        number = self.roles.parents[child].index(self.comm.rank)
        return self.slot_at(len(self.roles.children(child))) + number * self._words_per_reply

    def put(self, rank: int, at: int, *words: int) -> Put:
        """Return the put that writes these words into a rank's window, from there on."""
        return Put(self.words, torch.from_numpy(np.array(words, np.int64)), rank, at)  # sooner than torch.tensor

    def close(self) -> None:
        """Collective. Release the windows."""
        for opened in (self.up, self.down, self.along, self.words):
            opened.close()


def require_alive(comm: Communicator, needed: Iterable[int]) -> None:
    """Check that no rank has died without which the others can't go on; raise RankFailedError otherwise."""
    for rank in set(needed).intersection(comm.failures.failed()):
        raise RankFailedError(
            f"server rank {rank} has died, and its part of the parameters and of the optimiser's state with it. "
            "Resume from the last checkpoint."
        )


class Client:
    """Push a child's requests, one at a time.

    Attributes:
        pushed: how many requests so far.
        meanwhile: blocks until a request or a reply has come, and deals with requests: for a rank that is a server too.
    """

    def __init__(self, channel: RequestChannel):
        self._channel, self._comm = channel, channel.comm
        slots = [channel.roles.children(parent).index(self._comm.rank) for parent in channel.parents]  # this rank's
        self._places = [(p, channel.slot_at(slot)) for p, slot in zip(channel.parents, slots, strict=True)]
        self._awaited = f"the reply of server rank {', '.join(map(str, channel.parents))}"
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
        channel = self._channel
        along = [_NOTHING, _NOTHING]  # flags and values, where they are new
        if used is not None and (self._last_used is None or not torch.equal(used, self._last_used)):
            along[0] = self._last_used = used.clone()
        if values and values != self._last_values:
            along[1], self._last_values = torch.tensor(values, dtype=WIDE), values
        puts = []
        for i, (parent, at) in enumerate(self._places):
            found, lengths = channel.up.puts(parent, channel.shards[parent].of(tensors) if tensors else (), used)
            puts += [*found, *channel.along.puts(parent, along)[0]]
            stamps = () if clocks is None else clocks[i]
            weight_bits = struct.unpack("q", struct.pack("d", weight))
            puts.append(channel.put(parent, at + KIND, kind, *weight_bits, *lengths, len(stamps), *stamps))
        self._comm.put_all(puts)
        self.pushed += 1
        tickets = [(parent, at, channel.words.fetch_add(1, parent) + 1) for parent, at in self._places]
        self._comm.put_all([channel.put(parent, at + TICKET, ticket) for parent, at, ticket in tickets])

    def missing(self) -> list[int]:
        """Return the parents that have not replied to this rank's last request."""
        counts = self._channel.replied.tolist()
        return [p for p, count in zip(self._channel.parents, counts, strict=True) if count < self.pushed]

    def wait(self) -> Replies:
        """Block until every parent has replied; `channel.down.whole` then has the tensors, until the next push.

        Raises:
            RankFailedError: a server has died.
            DeadlineError: names the servers.
        """
        while self.missing():
            (self.meanwhile or self._block)()
        down, replies = self._channel.down, self._channel.replies
        if down.words and self._decoded < self.pushed:
            self._decoded = self.pushed
            for parent, words in zip(self._channel.parents, replies):
                list(down.read(parent, words[REPLY:].tolist()))
        heads = replies.tolist()
        waited_for = {head[BLOCKER]: head[HELD_US] * 1e-6 for head in heads if head[BLOCKER] != NOBODY}
        return Replies([head[CLOCK] for head in heads], waited_for)

    def _block(self) -> None:
        """Block until every parent has replied; raise an error if a server has died meanwhile."""
        channel, failures = self._channel, self._comm.failures
        until = self._comm.now() + failures.deadline_s
        while failures.tolerant and self.missing() and self._comm.now() < until:
            with suppress(DeadlineError):
                channel.words.wait(lambda _: not self.missing(), offset=channel.replies_at, deadline_s=CHECK_S)
            if self.missing():
                # Not parents alone: MPI tells of a rank that was killed, not of an aggregator that ended because of it.
                require_alive(self._comm, channel.roles.needed)
        if self.missing():
            channel.words.wait(
                lambda _: not self.missing(), offset=channel.replies_at, what=self._awaited, by=channel.parents
            )


class Inbox:
    """Take requests from a parent's channel.

    Args:
        client: of the same rank, whose missing replies errors name.

    Attributes:
        unanswered: the children whose request has been taken and not been replied to.
        since_s: when each child got its last reply, or began a period; from then on it owes a request.
    """

    def __init__(self, channel: RequestChannel, client: Client):
        self._channel, self._comm, self._client = channel, channel.comm, client
        count = len(channel.children)
        self._others = [child for child in channel.children if child != self._comm.rank]
        self._slot_of = {child: slot for slot, child in enumerate(channel.children)}
        self._reply_at = {child: channel.reply_at(child) for child in channel.children}
        self._taken = [0] * count  # the ticket of the last request taken from each slot
        self._replied = [0] * count  # how many requests of each child have been replied to
        self._paused = [0] * count  # how many of those taken ended a period
        self.unanswered: set[int] = set()
        self.since_s = dict.fromkeys(channel.children, self._comm.now())
        self._waited_s = 0.0  # for how long `next` has waited in vain

    def next(self, timeout_s: float | None = None) -> ServerRequest | None:
        """Block until there is a request, and take the one that came first; None where none came in time.

        Without `timeout_s` the communicator's deadline holds, and ends the run; it also does so where shorter timeouts
        have added up to it.

        Raises:
            DeadlineError: names the children that owe a request, since when, and where all ranks are.
        """
        slot = self._first()
        if slot is None:
            slot = self._await_first(timeout_s)
            if slot is None:
                return None
        self._waited_s = 0.0
        words, child = self._channel.requests[slot].tolist(), self._channel.children[slot]
        self._taken[slot] = words[TICKET]
        self.unanswered.add(child)
        self._paused[slot] += words[KIND] == PAUSE
        count_at = self._channel.count_at
        (weight,) = struct.unpack("d", struct.pack("q", words[WEIGHT]))
        clocks = tuple(words[count_at + 1 : count_at + 1 + words[count_at]])
        tensors = self._channel.up.read(child, words[LENGTHS:count_at])
        used, values = self._channel.along.read(child, ())
        return ServerRequest(child, words[KIND], weight, clocks, tensors, used, values)

    def _await_first(self, timeout_s: float | None) -> int | None:
        """Block until there is a request, and return its slot; None where none came in time."""
        limit_s = self._comm.failures.deadline_s if timeout_s is None else timeout_s
        try:
            self._channel.words.wait(
                lambda _: self._first() is not None, count=self._channel.replies_at, deadline_s=limit_s,
                what="a request from any worker", by=self._others if timeout_s is None else (),
            )  # fmt: skip
        except DeadlineError:
            self._waited_s += limit_s
            asked_for = timeout_s is not None and timeout_s >= self._comm.failures.deadline_s
            if asked_for or self._waited_s < self._comm.failures.deadline_s:
                return None
            raise self._late("a request from any worker", self._waited_s) from None
        return self._first()

    def poll(self) -> ServerRequest | None:
        """Take the request that came first; None where there is none."""
        return None if self._first() is None else self.next()

    def _first(self) -> int | None:
        """Return the slot of the request that came first, of those not taken; None where there is none."""
        tickets = self._channel.tickets.tolist()
        if tickets == self._taken:
            return None
        return min((ticket, slot) for slot, ticket in enumerate(tickets) if ticket > self._taken[slot])[1]

    def wait_event(self) -> None:
        """Block until there is a request to take or every parent has replied: for a rank that is child and parent."""
        what, deadline_s = "a request or a reply from any rank", self._comm.failures.deadline_s
        try:
            self._channel.words.wait(
                lambda _: self._first() is not None or not self._client.missing(), what=what, deadline_s=deadline_s,
                by=sorted({*self._others, *self._channel.parents} - {self._comm.rank}),
            )  # fmt: skip
        except DeadlineError:
            raise self._late(what, deadline_s) from None

    def reply(self, *replies: Reply) -> None:
        """Reply to requests. A reply is there before the word that announces it."""
        self._comm.put_all(self._puts(replies))

    def _puts(self, replies: Iterable[Reply]) -> Iterator[Put]:
        """Yield the puts that bring replies to their children: one may leave while the next one is compressed."""
        channel, now_s = self._channel, self._comm.now()
        for request, clock, tensors, blocker, held_s in replies:
            child = request.source
            slot, at = self._slot_of[child], self._reply_at[child]
            puts, lengths = channel.down.puts(child, tensors)
            yield from puts
            self._replied[slot] += 1
            self.unanswered.discard(child)
            self.since_s[child] = now_s
            yield channel.put(child, at + CLOCK, clock, blocker, round(held_s * 1e6), *lengths)
            yield channel.put(child, at + COUNT, self._replied[slot])

    def _late(self, what: str, waited_s: float) -> DeadlineError:
        """Return an error that names the ranks this one waits for, and says where all ranks are."""
        now_s = self._comm.now()
        silent = ", ".join(f"rank {child} (silent for {now_s - since:.1f} s)" for child, since in self._owing())
        missing = ", ".join(map(str, self._client.missing()))
        replies = f" Replies are missing of rank {missing}." if missing else ""
        return DeadlineError(
            f"rank {self._comm.rank}: {what} did not happen within {waited_s:g} s. Requests are missing of "
            f"{silent or 'nobody'}.{replies}{self._comm.failures.locate_ranks()}"
        )

    def _owing(self) -> list[tuple[int, float]]:
        """Return the children that could push and have not, and since when: they have a reply, and have not paused."""
        dead, children = self._comm.failures.failed(), self._channel.children
        alive = [(child, paused) for child, paused in zip(children, self._paused) if child not in dead]
        period = min((paused for _, paused in alive), default=0)
        owing = [child for child, paused in alive if child not in self.unanswered and paused == period]
        return [(child, self.since_s[child]) for child in owing]
