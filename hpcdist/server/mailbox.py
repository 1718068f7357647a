"""A server's mailbox: one slot per worker, filled by one-sided puts, emptied by the server in order of arrival.

A worker posts by copying its tensors into its slot, drawing a ticket from the server's counter and raising its flag,
the ticket. The server takes the flag with the lowest ticket, deals with the letter where it lies, and lowers the
flag by writing into the worker's own window, where the worker waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator

_TICKET, _KIND, _CLOCK = 0, 1, 2  # a worker's words on the server
_WORDS = 3
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
    """

    def __init__(self, comm: Communicator, server: int, workers: Sequence[int], like: Sequence[Tensor]):
        self._comm, self._server, self._workers = comm, server, list(workers)
        here = comm.rank == server
        slots = len(self._workers) if here else 0
        self._slots = [comm.window(slots * t.numel(), t.dtype) for t in like]
        self._lengths = [t.numel() for t in like]
        self._words = comm.window(slots * _WORDS, torch.int64)
        self._tickets = comm.window(1 if here else 0, torch.int64)
        self._dealt = comm.window(1, torch.int64)  # letters of this rank that the server has dealt with
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

    def wait(self) -> None:
        """Blocks until the server has dealt with this rank's last letter."""
        self._dealt.wait(lambda w: int(w[0]) == self._posted, what=f"the server (rank {self._server}) to take a letter")

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

    def dealt(self, letter: Letter) -> None:
        """Frees the letter's slot and lets its worker go on."""
        slot = self._workers.index(letter.worker)
        self._words.put(torch.tensor([0]), self._server, slot * _WORDS + _TICKET)
        self._dealt_with[slot] += 1
        self._dealt.put(torch.tensor([self._dealt_with[slot]]), letter.worker)

    def close(self) -> None:
        """Collective."""
        for window in (*self._slots, self._words, self._tickets, self._dealt):
            window.close()
