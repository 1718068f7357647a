"""Connect children and parents by requests and replies: one slot per child in its parent's memory.

A child (a worker, for example) pushes a request by one-sided puts: it copies its tensors into its slot at each parent
(its servers), gets a ticket from the parent's counter, and sets its flag to the ticket. The parent takes the new flag
with the lowest ticket, and replies by writing into the child's windows, where the child waits. So a rank waits only on
local memory, and a child with replies from all parents may write its slots again.

Requests and replies may be compressed (`codec.py`). Then slots have room for the longest message, and only its actual
length, which the header contains, is sent.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator, Put
from hpcdist.errors import DeadlineError, RankFailedError
from hpcdist.strategies.server.codec import OpenSlots, TensorSlots
from hpcdist.strategies.server.placement import Roles, Shard

# Kinds of requests: a gradient, or a sum of weighted gradients, with parameters in the reply; a push without a reply's
# parameters; a fetch of parameters without a gradient; the end of a period.
GRADIENT, SUM, PUSH, FETCH, PAUSE = 1, 2, 3, 4, 5
NOBODY = -1
CHECK_S = 0.5  # interval at which a waiting rank checks for failed ranks


@dataclass(eq=False)
class ServerRequest:
    """A request to a server, in its slot. `tensors` and `used` are views that stay valid until the reply.

    `tensors` are a sum of gradients; `clocks` has one entry per gradient, `weight` is the sum of their weights, and
    `values` are the worker's hyper-parameters, float64. Compressed gradients are decoded while iterating over
    `tensors`, once, into memory that all requests share. The server sets the other fields until it replies.
    """

    source: int
    kind: int
    weight: float
    clocks: tuple[int, ...]
    tensors: Iterable[Tensor] = field(repr=False, default=())
    used: Tensor = field(repr=False, default_factory=lambda: torch.empty(0, dtype=torch.bool))
    values: Tensor = field(repr=False, default_factory=lambda: torch.empty(0, dtype=torch.float64))
    since_s: float = 0.0  # time at which the server started to handle it
    added: bool = False  # added to the sum of the next update, or without a gradient
    applied: bool = False  # contained in an update, or in a sum sent to the aggregator's parent
    blocker: int = NOBODY  # the rank that it waits for


class Reply(NamedTuple):
    """Reply to a child's request with this shard's `tensors` (empty: no new values) and `clock`.

    The parent has delayed the reply by `held_s` seconds because of the rank `blocker`.
    """

    request: ServerRequest
    clock: int
    tensors: Sequence[Tensor] = ()
    blocker: int = NOBODY
    held_s: float = 0.0


class Replies(NamedTuple):
    """The clock of each parent, and the seconds of delay by the rank that caused it."""

    clocks: list[int]
    waited_for: dict[int, float]


WIDE = torch.float64  # of values
_NOTHING = torch.empty(0)
# The header is a window of int64 fields on each rank: the last ticket that it gave as a parent (COUNTER: 1 field); for
# each child its request: TICKET, KIND, WEIGHT (bits of a float64), message lengths from LENGTHS on, number of clocks,
# clocks; for each parent its reply: COUNT (of replies so far), CLOCK, BLOCKER, HELD_US, message lengths from REPLY on.
COUNTER = 1
TICKET, KIND, WEIGHT, LENGTHS = 0, 1, 2, 3
COUNT, CLOCK, BLOCKER, HELD_US, REPLY = 0, 1, 2, 3, 4


class RequestChannel:
    """Collective. Allocate slots for requests and replies on all ranks with parents or children.

    Args:
        shards: the shard of each server's requests and replies; an aggregator's is the whole model.
        templates: flat tensors as long as a whole request, equal on all ranks; compressed values are differences to
            these.
        names: number of parameters, each with a flag for its gradient.
        clocks: largest number of gradients in a request.
        up, down: allocate the slots of requests and of replies; `CodedSlots` compresses them.
        values: largest number of hyper-parameters in a request.
        replies: flat tensors as long as a reply of one parent; None: as long as its requests.
        without_tensors: the children whose requests have no tensors.

    Attributes:
        client: pushes this rank's requests to its parents.
        inbox: takes the requests of its children.
        up, down: the tensors of requests and of replies.
        stamp_slots: flags and hyper-parameters of requests.
    """

    def __init__(
        self, comm: Communicator, roles: Roles, shards: Mapping[int, Shard], templates: Sequence[Tensor], names: int,
        clocks: int = 1, up: OpenSlots = TensorSlots, down: OpenSlots = TensorSlots, values: int = 0,
        replies: Sequence[Tensor] | None = None, without_tensors: Collection[int] = (),
    ):  # fmt: skip
        self.comm, self.shards, self.roles, rank = comm, shards, roles, comm.rank
        self.parents, self.children = roles.parents.get(rank, ()), roles.children(rank)
        count, stamps = len(self.children), [torch.zeros(names, dtype=torch.bool), torch.zeros(values, dtype=WIDE)]
        nothing = Shard(((0, 0),) * len(templates))
        reply_templates, whole_reply = templates, None
        if replies is not None:
            reply_templates, whole_reply = replies, Shard(tuple((0, flat.numel()) for flat in replies))
        stamped = Shard(((0, names), (0, values)))
        self.up = up(
            comm, templates, roles.children, self.parents,
            lambda child, parent: nothing if child in without_tensors else shards[parent],
        )  # fmt: skip
        self.down = down(
            comm, reply_templates, lambda child: roles.parents.get(child, ()), self.children,
            lambda parent, child: whole_reply or shards[parent],
        )  # fmt: skip
        self.count_at = LENGTHS + self.up.n_lengths
        self._fields_per_slot = self.count_at + 1 + clocks
        self.fields_per_reply = REPLY + self.down.n_lengths
        self.stamp_slots = TensorSlots(comm, stamps, roles.children, self.parents, lambda child, parent: stamped)
        self.replies_at = self.slot_at(count)
        self.header = comm.window(self.replies_at + len(self.parents) * self.fields_per_reply, torch.int64)
        header = self.header.local.numpy()  # the same memory; NumPy reads a few elements faster than torch
        self.requests = header[COUNTER : self.replies_at].reshape(count, self._fields_per_slot)
        self.tickets = self.requests[:, TICKET]
        self.replies = header[self.replies_at :].reshape(len(self.parents), self.fields_per_reply)
        self.replied = self.replies[:, COUNT]
        self.client = Client(self)
        self.inbox = Inbox(self, self.client)

    def slot_at(self, slot: int) -> int:
        """Return the offset of a slot's header in its parent's window."""
        return COUNTER + slot * self._fields_per_slot

    def put(self, rank: int, offset: int, *header: int) -> Put:
        """Return the put that writes header fields into a rank's window, from `offset` on."""
        return Put(self.header, torch.from_numpy(np.array(header, np.int64)), rank, offset)  # faster than torch.tensor

    def require_alive(self) -> None:
        """Raise RankFailedError if a server or aggregator has failed."""
        for rank in set(self.roles.needed).intersection(self.comm.failures.failed()):
            raise RankFailedError(
                f"server rank {rank} has died, and its part of the parameters and of the optimiser's state with it. "
                "Resume from the last checkpoint."
            )

    def close(self) -> None:
        """Collective. Release the windows."""
        for opened in (self.up, self.down, self.stamp_slots, self.header):
            opened.close()


class Client:
    """Push a child's requests, one at a time.

    Attributes:
        pushed: number of requests so far.
        on_wait: blocks until a request or a reply has arrived, and handles requests; for a rank that is a server too.
    """

    def __init__(self, channel: RequestChannel):
        self._channel, self._comm = channel, channel.comm
        slots = [channel.roles.children(parent).index(self._comm.rank) for parent in channel.parents]  # this rank's
        self._slots_at_parents = [(p, channel.slot_at(slot)) for p, slot in zip(channel.parents, slots, strict=True)]
        self._awaited = f"the reply of server rank {', '.join(map(str, channel.parents))}"
        self._last_used: Tensor | None = None  # current contents of this rank's slots
        self._last_values: Sequence[float] = ()
        self.pushed = 0
        self._decoded = 0  # number of requests whose replies were decoded
        self.on_wait: Callable[[], None] | None = None

    def push(
        self, kind: int, clocks: Sequence[Sequence[int]] | None = None, tensors: Sequence[Tensor] = (),
        used: Tensor | None = None, weight: float = 0.0, values: Sequence[float] = (),
    ) -> None:  # fmt: skip
        """Copy a request into this rank's slot at every parent. All parents must have replied to the last request.

        Args:
            clocks: for each parent, the clocks of the gradients in the request.
            tensors: the whole request; each parent gets its shard. Empty: keep the contents of the slots.
            used: which parameters have a gradient. None: keep the contents of the slots.
            weight: the sum of the gradients' weights.
            values: hyper-parameters. Empty: keep the contents of the slots.
        """
        channel = self._channel
        new_stamps = [_NOTHING, _NOTHING]  # flags and values, if they have changed
        if used is not None and (self._last_used is None or not torch.equal(used, self._last_used)):
            new_stamps[0] = self._last_used = used.clone()
        if values and values != self._last_values:
            new_stamps[1], self._last_values = torch.tensor(values, dtype=WIDE), values
        puts = []
        for i, (parent, offset) in enumerate(self._slots_at_parents):
            of_tensors, lengths = channel.up.puts(parent, channel.shards[parent].of(tensors) if tensors else (), used)
            puts += [*of_tensors, *channel.stamp_slots.puts(parent, new_stamps)[0]]
            stamps = () if clocks is None else clocks[i]
            weight_bits = struct.unpack("q", struct.pack("d", weight))
            puts.append(channel.put(parent, offset + KIND, kind, *weight_bits, *lengths, len(stamps), *stamps))
        self._comm.put_all(puts)
        self.pushed += 1
        # Last, because parents see a request when its ticket arrives.
        tickets = [
            (parent, offset, channel.header.fetch_add(1, parent) + 1) for parent, offset in self._slots_at_parents
        ]
        self._comm.put_all([channel.put(parent, offset + TICKET, ticket) for parent, offset, ticket in tickets])

    def missing(self) -> list[int]:
        """Return the parents that have not replied to this rank's last request."""
        counts = self._channel.replied.tolist()
        return [p for p, count in zip(self._channel.parents, counts, strict=True) if count < self.pushed]

    def wait(self) -> Replies:
        """Block until every parent has replied; `channel.down.whole` then has the tensors, until the next push.

        Raises:
            RankFailedError: a server has failed.
            DeadlineError: a server did not reply in time; names the servers.
        """
        while self.missing():
            (self.on_wait or self._block)()
        down, replies = self._channel.down, self._channel.replies
        if down.n_lengths and self._decoded < self.pushed:
            self._decoded = self.pushed
            for parent, header in zip(self._channel.parents, replies):
                list(down.read(parent, header[REPLY:].tolist()))  # decodes into `down.whole`
        heads = replies.tolist()
        waited_for = {head[BLOCKER]: head[HELD_US] * 1e-6 for head in heads if head[BLOCKER] != NOBODY}
        return Replies([head[CLOCK] for head in heads], waited_for)

    def _block(self) -> None:
        """Block until every parent has replied; raise an error if a server fails."""
        channel, failures = self._channel, self._comm.failures
        until = self._comm.now() + failures.deadline_s
        while failures.tolerant and self.missing() and self._comm.now() < until:
            with suppress(DeadlineError):
                channel.header.wait(lambda _: not self.missing(), offset=channel.replies_at, deadline_s=CHECK_S)
            if self.missing():
                # Not only parents: an aggregator whose server has died ends a moment later.
                channel.require_alive()
        if self.missing():
            channel.header.wait(
                lambda _: not self.missing(), offset=channel.replies_at, what=self._awaited, by=channel.parents
            )


class Inbox:
    """Receive the requests of a parent's children.

    Args:
        client: the client of the same rank, for error messages.

    Attributes:
        pending: the children whose request was taken and has no reply yet.
        since_s: time of each child's last reply, or start of a period; from then on its next request is due.
    """

    def __init__(self, channel: RequestChannel, client: Client):
        self._channel, self._comm, self._client = channel, channel.comm, client
        count = len(channel.children)
        self._others = [child for child in channel.children if child != self._comm.rank]
        self._slot_of = {child: slot for slot, child in enumerate(channel.children)}
        self._reply_at = {  # offsets of this rank's reply headers in the children's windows
            child: channel.slot_at(len(channel.roles.children(child)))
            + channel.roles.parents[child].index(self._comm.rank) * channel.fields_per_reply
            for child in channel.children
        }
        self._taken = [0] * count  # the ticket of the last request taken from each slot
        self._replied = [0] * count  # number of replies to each child
        self._paused = [0] * count  # number of periods that each child has ended
        self.pending: set[int] = set()
        self.since_s = dict.fromkeys(channel.children, self._comm.now())
        self._waited_s = 0.0  # seconds that `next` has waited without a request

    def next(self, timeout_s: float | None = None) -> ServerRequest | None:
        """Block until there is a request, and take the first; return None after `timeout_s`.

        The communicator's deadline applies without `timeout_s`, and to the sum of consecutive shorter timeouts.

        Raises:
            DeadlineError: no request within the communicator's deadline; names the children whose request is due.
        """
        slot = self._first()
        if slot is None:
            slot = self._await_first(timeout_s)
            if slot is None:
                return None
        self._waited_s = 0.0
        header, child = self._channel.requests[slot].tolist(), self._channel.children[slot]
        self._taken[slot] = header[TICKET]
        self.pending.add(child)
        self._paused[slot] += header[KIND] == PAUSE
        count_at = self._channel.count_at
        (weight,) = struct.unpack("d", struct.pack("q", header[WEIGHT]))
        clocks = tuple(header[count_at + 1 : count_at + 1 + header[count_at]])
        tensors = self._channel.up.read(child, header[LENGTHS:count_at])
        used, values = self._channel.stamp_slots.read(child, ())
        return ServerRequest(child, header[KIND], weight, clocks, tensors, used, values)

    def _await_first(self, timeout_s: float | None) -> int | None:
        """Block until there is a request, and return its slot; None after the timeout."""
        limit_s = self._comm.failures.deadline_s if timeout_s is None else timeout_s
        try:
            self._channel.header.wait(
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
        """Take the first request, without waiting; None if there is none."""
        return None if self._first() is None else self.next()

    def _first(self) -> int | None:
        """Return the slot of the first request that was not taken, or None."""
        tickets = self._channel.tickets.tolist()
        if tickets == self._taken:
            return None
        return min((ticket, slot) for slot, ticket in enumerate(tickets) if ticket > self._taken[slot])[1]

    def wait_event(self) -> None:
        """Block until there is a request or every parent has replied; for a rank that is child and parent."""
        what, deadline_s = "a request or a reply from any rank", self._comm.failures.deadline_s
        try:
            self._channel.header.wait(
                lambda _: self._first() is not None or not self._client.missing(), what=what, deadline_s=deadline_s,
                by=sorted({*self._others, *self._channel.parents} - {self._comm.rank}),
            )  # fmt: skip
        except DeadlineError:
            raise self._late(what, deadline_s) from None

    def reply(self, *replies: Reply) -> None:
        """Reply to requests. A reply's count is written after its tensors."""
        self._comm.put_all(self._puts(replies))

    def _puts(self, replies: Iterable[Reply]) -> Iterator[Put]:
        """Yield the puts of replies, so that one is sent while the next is compressed."""
        channel, now_s = self._channel, self._comm.now()
        for request, clock, tensors, blocker, held_s in replies:
            child = request.source
            slot, offset = self._slot_of[child], self._reply_at[child]
            puts, lengths = channel.down.puts(child, tensors)
            yield from puts
            self._replied[slot] += 1
            self.pending.discard(child)
            self.since_s[child] = now_s
            yield channel.put(child, offset + CLOCK, clock, blocker, round(held_s * 1e6), *lengths)
            yield channel.put(child, offset + COUNT, self._replied[slot])

    def _late(self, what: str, waited_s: float) -> DeadlineError:
        """Return an error with the ranks that this rank waits for, and the line of code where each rank is."""
        now_s = self._comm.now()
        silent_ranks = ", ".join(f"rank {child} (silent for {now_s - since:.1f} s)" for child, since in self._owing())
        missing = ", ".join(map(str, self._client.missing()))
        replies = f" Replies are missing of rank {missing}." if missing else ""
        return DeadlineError(
            f"rank {self._comm.rank}: {what} did not happen within {waited_s:g} s. Requests are missing of "
            f"{silent_ranks or 'nobody'}.{replies}{self._comm.failures.locate_ranks()}"
        )

    def _owing(self) -> list[tuple[int, float]]:
        """Return the children whose request is due, and since when: they have a reply and have not paused."""
        dead, children = self._comm.failures.failed(), self._channel.children
        alive = [(child, paused) for child, paused in zip(children, self._paused) if child not in dead]
        period = min((paused for _, paused in alive), default=0)  # a child with more pauses has ended it
        owing = [child for child, paused in alive if child not in self.pending and paused == period]
        return [(child, self.since_s[child]) for child in owing]
