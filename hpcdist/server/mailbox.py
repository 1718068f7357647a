"""Mailboxes: one slot per child in its parent's memory, filled by one-sided puts, emptied in order of arrival.

A child posts by copying its tensors into its slot at each of its parents, drawing a ticket from the parent's counter
and raising its flag, the ticket. The parent takes the new flag with the lowest ticket, and answers by writing into
the child's own windows, where the child waits. So only a rank's own memory is ever waited on, and a child that has an
answer from every parent owns its slots again.

Letters and answers may be compressed (`server/coding.py`). Then slots have room for the longest message, and words
beside them say how long it is; no more than that travels.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator, Put
from hpcdist.errors import DeadlineError
from hpcdist.server.coding import Coding
from hpcdist.server.flow import Flow
from hpcdist.server.roles import Roles
from hpcdist.server.shards import Shard

# Kinds of letters: a gradient, or a sum of weighted ones, to be answered with parameters; a push without; a question
# for parameters without a gradient; the end of a period.
GRADIENT, SUM, PUSH, FETCH, PAUSE = 1, 2, 3, 4, 5
NOBODY = -1

_COUNTER = 1  # words at the front of a parent's: the ticket drawn last
_TICKET, _KIND, _WEIGHT, _LENGTHS = 0, 1, 2, 3  # a slot's words; after the lengths the number of clocks, and the clocks
_COUNT, _CLOCK, _BLOCKER, _HELD_US, _ANSWER = 0, 1, 2, 3, 4  # a child's words for each parent; then lengths


@dataclass
class Letter:
    """A letter in its slot. `tensors` and `used` are views that stay valid until it is answered.

    `clocks` has one entry per gradient that the tensors are the sum of, `weight` is the sum of their weights.
    Compressed gradients are decoded as `tensors` is gone through, once, into memory that all letters share.
    """

    source: int
    kind: int
    weight: float
    clocks: tuple[int, ...]
    tensors: Iterable[Tensor] = field(repr=False)
    used: Tensor = field(repr=False)


@dataclass(frozen=True)
class Answer:
    """What a parent said: its clock, and for how many seconds it held the answer back because of which rank."""

    clock: int
    blocker: int
    held_s: float


class Reply(NamedTuple):
    """The answer to a letter: its child may go on, with this shard's `tensors` (none: nothing new) and `clock`."""

    letter: Letter
    clock: int
    tensors: Sequence[Tensor] = ()
    blocker: int = NOBODY
    held_s: float = 0.0


class Mailbox:
    """Collective. The slots and answers of all ranks with parents or children.

    Args:
        shards: what each server's letters and answers cover; an aggregator's cover all.
        like: flat tensors as long as a whole letter, the same on all ranks, and values that all ranks have: compressed
            values are of what has changed since.
        names: how many flags say which parameters have a gradient.
        clocks: the most gradients that a letter is the sum of.
        letters, answers: how these are compressed; None: not at all.
    """

    def __init__(
        self,
        comm: Communicator,
        roles: Roles,
        shards: Mapping[int, Shard],
        like: Sequence[Tensor],
        names: int,
        clocks: int = 1,
        letters: Coding | None = None,
        answers: Coding | None = None,
    ):
        self._comm, self._roles, self._shards, rank = comm, roles, shards, comm.rank
        self._parents = roles.parents.get(rank, ())
        self._children = {r: roles.children(r) for r in (rank, *self._parents)}
        own = self._children[rank]

        def from_children(parent: int) -> list[tuple[int, Shard]]:
            return [(child, shards[parent]) for child in self._children[parent]]

        def from_parents(child: int) -> list[tuple[int, Shard]]:
            return [(parent, shards[parent]) for parent in roles.parents.get(child, ())]

        self.letters = Flow(comm, letters, like, from_children, from_parents(rank), up=True)
        self.answers = Flow(comm, answers, like, from_parents, from_children(rank), up=False)
        self._count_at = _LENGTHS + self.letters.words
        self._words_per_slot = self._count_at + 1 + clocks
        self._words_per_answer = _ANSWER + self.answers.words
        self._used = comm.window(len(own) * names, torch.bool)
        self._names = names
        self._flags = [self._used.local[i * names : (i + 1) * names] for i in range(len(own))]
        self._answers_at = _COUNTER + len(own) * self._words_per_slot
        self._words = comm.window(self._answers_at + len(self._parents) * self._words_per_answer, torch.int64)
        words = self._words.local.numpy()  # the same memory; NumPy looks at a few words sooner than torch
        self._inbox = words[_COUNTER : self._answers_at].reshape(len(own), self._words_per_slot)
        self._told = words[self._answers_at :].reshape(len(self._parents), self._words_per_answer)
        self._last_used: Tensor | None = None  # what lies in this rank's slots
        self._taken = [0] * len(own)  # the ticket of the last letter taken from each slot
        self._answered = [0] * len(own)  # how many letters of each child have been answered
        self._reply_at = {child: self._answer_of(child) for child in own}
        self.posted = 0
        self._opened = 0  # answers to so many letters have been decoded

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
        if used is not None and self._last_used is not None and torch.equal(used, self._last_used):
            used = None
        puts, flags = [], []
        for i, parent in enumerate(self._parents):
            slot = self._children[parent].index(self._comm.rank)
            found, lengths = self.letters.puts(parent, self._shards[parent].of(tensors) if tensors else ())
            puts += found
            if used is not None:
                puts.append(Put(self._used, used, parent, slot * self._names))
            stamps = [] if clocks is None else list(clocks[i])
            head = [kind, *struct.unpack("q", struct.pack("d", weight)), *lengths, len(stamps), *stamps]
            at = _COUNTER + slot * self._words_per_slot
            puts.append(Put(self._words, torch.tensor(head), parent, at + _KIND))
            flags.append((parent, at + _TICKET))
        self._comm.put_all(puts)
        self.posted += 1
        self._last_used = self._last_used if used is None else used.clone()
        tickets = [(parent, at, self._words.fetch_add(1, parent) + 1) for parent, at in flags]
        self._comm.put_all(Put(self._words, torch.tensor([ticket]), parent, at) for parent, at, ticket in tickets)

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
        if self.answers.words and self._opened < self.posted:
            self._opened = self.posted
            for parent, words in zip(self._parents, self._told):
                list(self.answers.read(parent, words[_ANSWER:].tolist()))
        return [Answer(int(w[_CLOCK]), int(w[_BLOCKER]), int(w[_HELD_US]) * 1e-6) for w in self._told]

    @property
    def answer(self) -> list[Tensor]:
        """The tensors of the last answers, of all shards together; valid until the next `post`."""
        return self.answers.arrived()

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
        words, child = self._inbox[slot].tolist(), self._children[self._comm.rank][slot]
        (weight,) = struct.unpack("d", struct.pack("q", words[_WEIGHT]))
        first = self._count_at + 1
        clocks = tuple(words[first : first + words[self._count_at]])
        tensors = self.letters.read(child, words[_LENGTHS : self._count_at])
        return Letter(child, words[_KIND], weight, clocks, tensors, self._flags[slot])

    def reply(self, *replies: Reply) -> None:
        """Answers letters. What each child gets is there before the word that says so."""
        self._comm.put_all(put for reply in replies for put in self._puts(reply))

    def _puts(self, reply: Reply) -> Iterator[Put]:
        child = reply.letter.source
        puts, lengths = self.answers.puts(child, reply.tensors)
        yield from puts
        slot, at = self._children[self._comm.rank].index(child), self._reply_at[child]
        self._answered[slot] += 1
        head = [reply.clock, reply.blocker, round(reply.held_s * 1e6), *lengths]
        yield Put(self._words, torch.tensor(head), child, at + _CLOCK)
        yield Put(self._words, torch.tensor([self._answered[slot]]), child, at + _COUNT)

    def _answer_of(self, child: int) -> int:
        """Where this rank's words lie in a child's window."""
        slots = len(self._roles.children(child)) * self._words_per_slot
        return _COUNTER + slots + self._roles.parents[child].index(self._comm.rank) * self._words_per_answer

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def state(self) -> dict:
        """What compression remembers; empty without."""
        flows = {"letters": self.letters, "answers": self.answers}
        return {name: flow.state() for name, flow in flows.items() if flow.words}

    def load_state(self, state: dict, values: Sequence[Tensor]) -> None:
        """Collective. Takes up what `state()` or `adapted()` gave; where nothing is said, this rank has `values`."""
        for name, flow in (("letters", self.letters), ("answers", self.answers)):
            if flow.words:
                flow.load_state(state.get(name, {}), values)

    def adapted(self, states: Sequence[dict], workers: int) -> dict:
        """A state for every rank of a world of another size than that of `states`, which had so many workers."""
        flows = {"letters": self.letters, "answers": self.answers}
        return {name: flow.adapted([s[name] for s in states if name in s], workers) for name, flow in flows.items()}

    def close(self) -> None:
        """Collective."""
        self._flags.clear()  # their memory goes
        for opened in (self.letters, self.answers, self._used, self._words):
            opened.close()
