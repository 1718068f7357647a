"""Mailboxes: one slot per child in its parent's memory, filled by one-sided puts, emptied in order of arrival.

A child posts by copying its tensors into its slot at each of its parents, drawing a ticket from the parent's counter
and raising its flag, the ticket. The parent takes the new flag with the lowest ticket, and answers by writing into
the child's own windows, where the child waits. So only a rank's own memory is ever waited on, and a child that has an
answer from every parent owns its slots again.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import DeadlineError
from hpcdist.server.roles import Roles
from hpcdist.server.shards import Shard

# Kinds of letters: a gradient, or a sum of weighted ones, to be answered with parameters; a push without; a question
# for parameters without a gradient; the end of a period.
GRADIENT, SUM, PUSH, FETCH, PAUSE = 1, 2, 3, 4, 5
NOBODY = -1

_COUNTER = 1  # words at the front of a parent's: the ticket drawn last
_TICKET, _KIND, _WEIGHT, _CLOCKS = 0, 1, 2, 3  # a slot's words; then the number of clocks, and the clocks
_COUNT, _CLOCK, _BLOCKER, _HELD_US = 0, 1, 2, 3  # a child's words for each parent
_ANSWER = 4


@dataclass
class Letter:
    """A letter in its slot. `tensors` and `used` are views that stay valid until it is answered.

    `clocks` has one entry per gradient that the tensors are the sum of, `weight` is the sum of their weights.
    """

    source: int
    kind: int
    weight: float
    clocks: tuple[int, ...]
    tensors: list[Tensor] = field(repr=False)
    used: Tensor = field(repr=False)


@dataclass(frozen=True)
class Answer:
    """What a parent said: its clock, and for how many seconds it held the answer back because of which rank."""

    clock: int
    blocker: int
    held_s: float


class Mailbox:
    """Collective. The slots and answers of all ranks with parents or children.

    Args:
        shards: what each server's letters and answers cover; an aggregator's cover all.
        like: flat tensors as long as a whole letter; only lengths and dtypes are used, the same on all ranks.
        names: how many flags say which parameters have a gradient.
        clocks: the most gradients that a letter is the sum of.
    """

    def __init__(
        self,
        comm: Communicator,
        roles: Roles,
        shards: Mapping[int, Shard],
        like: Sequence[Tensor],
        names: int,
        clocks: int = 1,
    ):
        self._comm, self._roles, rank = comm, roles, comm.rank
        self._parents = roles.parents.get(rank, ())
        self._children = {r: roles.children(r) for r in (rank, *self._parents)}
        self._shards = shards
        own = self._children[rank]
        self._words_per_slot = _CLOCKS + 1 + clocks
        self._here = shards[rank].of(like) if own else [t[:0] for t in like]
        self._lengths = {p: [t.numel() for t in shards[p].of(like)] for p in self._parents}
        self._slots = [comm.window(len(own) * part.numel(), part.dtype) for part in self._here]
        self._used = comm.window(len(own) * names, torch.bool)
        self._names = names
        self._answers = [comm.window(t.numel() if self._parents else 0, t.dtype) for t in like]
        self._answers_at = _COUNTER + len(own) * self._words_per_slot
        self._words = comm.window(self._answers_at + len(self._parents) * _ANSWER, torch.int64)
        words = self._words.local.numpy()  # the same memory; NumPy looks at a few words sooner than torch
        self._inbox = words[_COUNTER : self._answers_at].reshape(len(own), self._words_per_slot)
        self._told = words[self._answers_at :].reshape(len(self._parents), _ANSWER)
        self._views = [self._slot_views(slot) for slot in range(len(own))]
        self._last_used: Tensor | None = None  # what lies in this rank's slots
        self._taken = [0] * len(own)  # the ticket of the last letter taken from each slot
        self._answered = [0] * len(own)  # how many letters of each child have been answered
        self._reply_at = {child: self._answer_of(child) for child in own}
        self.posted = 0

    # --- a child --------------------------------------------------------------------------------------------------
    def post(
        self,
        kind: int,
        clocks: Sequence[Sequence[int]] | None = None,
        tensors: Sequence[Tensor] = (),
        used: Tensor | None = None,
        weight: float = 0.0,
    ) -> None:
        """Copies a letter into this rank's slot at every parent. The last one must have been answered by all.

        Args:
            clocks: for each parent those of the gradients in the letter.
            tensors: the whole letter, of which each parent gets its shard; none leaves what lies in the slots.
        """
        flags = []
        if used is not None and self._last_used is not None and torch.equal(used, self._last_used):
            used = None
        for i, parent in enumerate(self._parents):
            slot = self._children[parent].index(self._comm.rank)
            if tensors:
                parts = self._shards[parent].of(tensors)
                for window, part, length in zip(self._slots, parts, self._lengths[parent], strict=True):
                    if length:
                        window.put(part, parent, slot * length)
            if used is not None:
                self._used.put(used, parent, slot * self._names)
            head = [kind, *struct.unpack("q", struct.pack("d", weight))]
            stamps = [] if clocks is None else list(clocks[i])
            at = _COUNTER + slot * self._words_per_slot
            self._words.put(torch.tensor([*head, len(stamps), *stamps]), parent, at + _KIND)
            flags.append((parent, at + _TICKET))
        self.posted += 1
        self._last_used = self._last_used if used is None else used.clone()
        for parent, at in flags:
            ticket = self._words.fetch_add(1, parent) + 1
            self._words.put(torch.tensor([ticket]), parent, at)

    def answered(self) -> bool:
        """Whether every parent has answered this rank's last letter."""
        return all(count == self.posted for count in self._told[:, _COUNT].tolist())

    def wait_for(self, timeout_s: float) -> bool:
        """Blocks until every parent has answered, but no longer than that; whether they have."""
        if not self.answered():
            try:
                self._words.wait(lambda _: self.answered(), offset=self._answers_at, deadline_s=max(0.0, timeout_s))
            except DeadlineError:
                return self.answered()
        return True

    def wait(self) -> list[Answer]:
        """Blocks until every parent has answered; what each one said."""
        if not self.answered():
            what = f"the answer of server rank {', '.join(map(str, self._parents))}"
            self._words.wait(lambda _: self.answered(), offset=self._answers_at, what=what)
        return [Answer(int(w[_CLOCK]), int(w[_BLOCKER]), int(w[_HELD_US]) * 1e-6) for w in self._told]

    @property
    def answer(self) -> list[Tensor]:
        """The tensors of the last answers, where they arrived, of all shards together; valid until the next `post`."""
        return [window.local for window in self._answers]

    # --- a parent -------------------------------------------------------------------------------------------------
    def next(self, timeout_s: float | None = None) -> Letter | None:
        """Blocks until there is a letter, and takes the one that came first; None where none came in time.

        Without `timeout_s` the communicator's deadline holds, and ends the run.
        """
        if not self._arrived():
            try:
                self._words.wait(
                    lambda _: self._arrived(), count=self._answers_at, what="a letter from any worker",
                    deadline_s=timeout_s,
                )  # fmt: skip
            except DeadlineError:
                if timeout_s is None:
                    raise
                return None
        tickets = self._inbox[:, _TICKET].tolist()
        slot = min((t, i) for i, t in enumerate(tickets) if t > self._taken[i])[1]
        self._taken[slot] = tickets[slot]
        return self._read(slot)

    def wait_event(self) -> None:
        """Blocks until there is a letter to take or every parent has answered: for a rank that is child and parent."""
        self._words.wait(lambda _: self._arrived() or self.answered(), what="a letter or an answer from any rank")

    def poll(self) -> Letter | None:
        """The letter that came first; None where there is none."""
        return self.next() if self._arrived() else None

    def _arrived(self) -> bool:
        return any(ticket > taken for ticket, taken in zip(self._inbox[:, _TICKET].tolist(), self._taken))

    def _read(self, slot: int) -> Letter:
        words = self._inbox[slot].tolist()
        (weight,) = struct.unpack("d", struct.pack("q", words[_WEIGHT]))
        clocks = tuple(words[_CLOCKS + 1 : _CLOCKS + 1 + words[_CLOCKS]])
        return Letter(self._children[self._comm.rank][slot], words[_KIND], weight, clocks, *self._views[slot])

    def _slot_views(self, slot: int) -> tuple[list[Tensor], Tensor]:
        """The tensors of a letter in that slot, and its flags."""
        views = [
            window.local[slot * part.numel() : (slot + 1) * part.numel()]
            for window, part in zip(self._slots, self._here, strict=True)
        ]
        return views, self._used.local[slot * self._names : (slot + 1) * self._names]

    def reply(
        self, letter: Letter, clock: int, tensors: Sequence[Tensor] = (), blocker: int = NOBODY, held_s: float = 0.0
    ) -> None:
        """Answers a letter: its child may go on, with this shard's `tensors` (none: nothing new) and `clock`."""
        rank, child = self._comm.rank, letter.source
        for window, tensor, (start, _) in zip(self._answers, tensors, self._shards[rank].ranges, strict=bool(tensors)):
            if tensor.numel():
                window.put(tensor, child, start)
        slot = self._children[rank].index(child)
        self._answered[slot] += 1
        at = self._reply_at[child]
        self._words.put(torch.tensor([clock, blocker, round(held_s * 1e6)]), child, at + _CLOCK)
        self._words.put(torch.tensor([self._answered[slot]]), child, at + _COUNT)

    def _answer_of(self, child: int) -> int:
        """Where this rank's words lie in a child's window."""
        slots = len(self._roles.children(child)) * self._words_per_slot
        return _COUNTER + slots + self._roles.parents[child].index(self._comm.rank) * _ANSWER

    def close(self) -> None:
        """Collective."""
        self._views.clear()  # their memory goes
        for window in (*self._slots, self._used, *self._answers, self._words):
            window.close()
