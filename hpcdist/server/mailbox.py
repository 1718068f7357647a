"""A server's mailbox: one slot per worker, filled by one-sided puts, emptied by the server in order of arrival.

A worker posts by copying its tensors into its slot, drawing a ticket from the server's counter and raising its flag,
the ticket. The server takes the flag with the lowest ticket, deals with the letter where it lies, and answers by
writing into the worker's own windows, where the worker waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator

_TICKET, _KIND, _CLOCK = 0, 1, 2  # a worker's words on the server
_WORDS = 3
_COUNT, _REPLY_CLOCK = 0, 1  # a worker's own words
GRADIENT, PAUSE = 1, 2


@dataclass(frozen=True)
class Letter:
    """A letter in its slot: `tensors` are views that stay valid until it is dealt with."""

    worker: int
    kind: int
    clock: int
    tensors: list[Tensor]


class Mailbox:
    """Collective. The mailbox of rank `server` for the ranks `workers`.

    Args:
        like: the tensors of a letter, flat; only lengths and dtypes are used, which agree on all ranks.
        answer_like: likewise those of an answer.
    """

    def __init__(
        self,
        comm: Communicator,
        server: int,
        workers: Sequence[int],
        like: Sequence[Tensor],
        answer_like: Sequence[Tensor],
    ):
        self._comm, self._server, self._workers = comm, server, list(workers)
        here = comm.rank == server
        slots = len(self._workers) if here else 0
        self._slots = [comm.window(slots * t.numel(), t.dtype) for t in like]
        self._lengths = [t.numel() for t in like]
        self._words = comm.window(slots * _WORDS, torch.int64)
        self._tickets = comm.window(1 if here else 0, torch.int64)
        self._answers = [comm.window(0 if here else t.numel(), t.dtype) for t in answer_like]
        self._answered = comm.window(2, torch.int64)  # how many letters of this rank the server has dealt with, clock
        self._posted = 0
        self._dealt_with = [0] * len(self._workers)

    # --- a worker -------------------------------------------------------------------------------------------------
    def post(self, tensors: Sequence[Tensor], clock: int, kind: int = GRADIENT) -> None:
        """Copies `tensors` (none: leaves the slot's as they are) into this rank's slot, once that is free."""
        self.wait()
        slot = self._workers.index(self._comm.rank)
        for window, tensor, length in zip(self._slots, tensors, self._lengths, strict=bool(tensors)):
            window.put(tensor, self._server, slot * length)
        self._words.put(torch.tensor([kind, clock]), self._server, slot * _WORDS + _KIND)
        ticket = self._tickets.fetch_add(1, self._server) + 1
        self._words.put(torch.tensor([ticket]), self._server, slot * _WORDS + _TICKET)
        self._posted += 1

    def wait(self) -> int:
        """Blocks until the server has dealt with this rank's last letter; the clock that came with its answer."""
        self._answered.wait(
            lambda w: int(w[_COUNT]) == self._posted, what=f"the answer of the server, rank {self._server}"
        )
        return int(self._answered.local[_REPLY_CLOCK])

    @property
    def answer(self) -> list[Tensor]:
        """The tensors of the last answer, where they arrived; valid until the next `post`."""
        return [window.local for window in self._answers]

    # --- the server -----------------------------------------------------------------------------------------------
    def next(self) -> Letter:
        """Blocks until there is a letter; the one that came first."""
        self._words.wait(lambda w: bool((w[_TICKET::_WORDS] > 0).any()), what="a letter from any worker")
        words = self._words.local.reshape(-1, _WORDS)
        tickets = words[:, _TICKET].tolist()
        slot = min((t, i) for i, t in enumerate(tickets) if t > 0)[1]
        _, kind, clock = words[slot].tolist()
        views = [w.local[slot * n : (slot + 1) * n] for w, n in zip(self._slots, self._lengths, strict=True)]
        return Letter(self._workers[slot], kind, clock, views)

    def deal(self, letter: Letter, clock: int, answer: Sequence[Tensor] = ()) -> None:
        """Frees the letter's slot, and lets its worker go on with `answer` (none: nothing new) and `clock`."""
        slot = self._workers.index(letter.worker)
        for window, tensor in zip(self._answers, answer, strict=bool(answer)):
            window.put(tensor, letter.worker)
        self._words.put(torch.tensor([0]), self._server, slot * _WORDS + _TICKET)
        self._dealt_with[slot] += 1
        self._answered.put(torch.tensor([clock]), letter.worker, _REPLY_CLOCK)
        self._answered.put(torch.tensor([self._dealt_with[slot]]), letter.worker, _COUNT)

    def close(self) -> None:
        """Collective."""
        for window in (*self._slots, self._words, self._tickets, *self._answers, self._answered):
            window.close()
