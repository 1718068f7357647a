"""Take the requests of this rank's children in order of arrival, and reply to them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from hpcdist.comm.communicator import Put
from hpcdist.errors import DeadlineError
from hpcdist.strategies.server.client import Client
from hpcdist.strategies.server.requests import PAUSE, Reply, ServerRequest
from hpcdist.strategies.server.slots import CLOCK, COUNT, KIND, LENGTHS, TICKET, WEIGHT, Slots


class Inbox:
    """Take requests from a parent's slots.

    Args:
        client: of the same rank, whose missing replies errors name.
    """

    def __init__(self, slots: Slots, client: Client):
        self._slots, self._comm, self._client = slots, slots.comm, client
        count = len(slots.children)
        self._slot_of = {child: slot for slot, child in enumerate(slots.children)}
        self._reply_at = {child: slots.reply_at(child) for child in slots.children}
        self._taken = [0] * count  # the ticket of the last request taken from each slot
        self._received = [0] * count  # how many requests of each child have been taken
        self._replied = [0] * count  # and how many have been replied to
        self._paused = [0] * count  # how many of them ended a period
        self._heard_s = [self._comm.now()] * count  # when the last one was taken
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
            limit_s = self._comm.deadline_s if timeout_s is None else timeout_s
            try:
                self._slots.words.wait(
                    lambda _: self._first() is not None, count=self._slots.replies_at, deadline_s=limit_s,
                    what="a request from any worker",
                )  # fmt: skip
            except DeadlineError:
                self._waited_s += limit_s
                asked_for = timeout_s is not None and timeout_s >= self._comm.deadline_s
                if asked_for or self._waited_s < self._comm.deadline_s:
                    return None
                raise self._late("a request from any worker", self._waited_s) from None
            slot = self._first()
        self._waited_s = 0.0
        words, child = self._slots.requests[slot].tolist(), self._slots.children[slot]
        self._taken[slot], self._heard_s[slot] = words[TICKET], self._comm.now()
        self._received[slot] += 1
        self._paused[slot] += words[KIND] == PAUSE
        count_at = self._slots.count_at
        (weight,) = struct.unpack("d", struct.pack("q", words[WEIGHT]))
        clocks = tuple(words[count_at + 1 : count_at + 1 + words[count_at]])
        tensors = self._slots.up.read(child, words[LENGTHS:count_at])
        return ServerRequest(
            child, words[KIND], weight, clocks, tensors, self._slots.flags_of[slot], self._slots.values_of[slot]
        )

    def poll(self) -> ServerRequest | None:
        """Take the request that came first; None where there is none."""
        return None if self._first() is None else self.next()

    def _first(self) -> int | None:
        """Return the slot of the request that came first, of those not taken; None where there is none."""
        tickets = self._slots.tickets.tolist()
        if tickets == self._taken:
            return None
        return min((ticket, slot) for slot, ticket in enumerate(tickets) if ticket > self._taken[slot])[1]

    def wait_event(self) -> None:
        """Block until there is a request to take or every parent has replied: for a rank that is child and parent."""
        what, deadline_s = "a request or a reply from any rank", self._comm.deadline_s
        try:
            self._slots.words.wait(
                lambda _: self._first() is not None or self._client.replied(), what=what, deadline_s=deadline_s
            )
        except DeadlineError:
            raise self._late(what, deadline_s) from None

    def reply(self, *replies: Reply) -> None:
        """Reply to requests. A reply is there before the word that announces it."""
        self._comm.put_all(self._puts(replies))

    def _puts(self, replies: Iterable[Reply]) -> Iterator[Put]:
        """Yield the puts that bring replies to their children."""
        slots = self._slots
        for request, clock, tensors, blocker, held_s in replies:
            child = request.source
            slot, at = self._slot_of[child], self._reply_at[child]
            puts, lengths = slots.down.puts(child, tensors)
            yield from puts
            self._replied[slot] += 1
            yield slots.put(child, at + CLOCK, clock, blocker, round(held_s * 1e6), *lengths)
            yield slots.put(child, at + COUNT, self._replied[slot])

    def _late(self, what: str, waited_s: float) -> DeadlineError:
        """Return an error that names the ranks this one waits for, and says where all ranks are."""
        now_s = self._comm.now()
        silent = ", ".join(f"rank {child} (silent for {now_s - since:.1f} s)" for child, since in self._owing())
        missing = ", ".join(map(str, self._client.missing()))
        replies = f" Replies are missing of rank {missing}." if missing else ""
        return DeadlineError(
            f"rank {self._comm.rank}: {what} did not happen within {waited_s:g} s. Requests are missing of "
            f"{silent or 'nobody'}.{replies}{self._comm.whereabouts()}"
        )

    def _owing(self) -> list[tuple[int, float]]:
        """Return the children that could push and have not, and since when: they have a reply, and have not paused."""
        dead, children = self._comm.failed(), self._slots.children
        slots = [i for i, child in enumerate(children) if child not in dead]
        period = min((self._paused[i] for i in slots), default=0)
        owing = [i for i in slots if self._received[i] == self._replied[i] and self._paused[i] == period]
        return [(children[i], self._heard_s[i]) for i in owing]
