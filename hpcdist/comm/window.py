"""Memory that other ranks read and change: `Memory` has get and put, `Window` atomic operations and waiting too."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from hpcdist.errors import CommunicationError


class Memory(abc.ABC):
    """Memory that every rank of a communicator can read and write without its owner taking part.

    Each call is an epoch of its own (passive target): when it returns, the transfer is complete at both ends.
    `offset` counts elements. Single elements are never torn; a longer `get` that overlaps another rank's `put` may
    mix old and new elements. For a consistent read use `hpcdist.comm.snapshot`.
    """

    local: Tensor  # this rank's exposed memory, flat; others may change it at any time

    @abc.abstractmethod
    def get(self, out: Tensor, rank: int, offset: int = 0) -> None:
        """Copy `len(out)` elements of `rank`'s memory, from `offset` on, into `out` (overwritten)."""

    def read(self, rank: int, offset: int, count: int, out: Tensor | None = None) -> Tensor:
        """Return `count` elements of `rank`'s memory: a view if that memory is mapped here, else a copy.

        Not to be written; what lies in place stays what it is only until somebody changes it there.

        Args:
            out: memory for the copy, shape (count,); new if None.
        """
        out = torch.empty(count, dtype=self.local.dtype) if out is None else out
        self.get(out, rank, offset)
        return out

    @abc.abstractmethod
    def put(self, values: Tensor, rank: int, offset: int = 0) -> None:
        """Copy `values` into `rank`'s memory from `offset` on."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the memory; `local` must not be used afterwards. Collective for a window."""


class Window(Memory):
    """Memory that ranks can also add to, change atomically and wait on."""

    @abc.abstractmethod
    def accumulate(self, values: Tensor, rank: int, offset: int = 0) -> None:
        """Add `values` to `rank`'s memory from `offset` on. Atomic per element among accumulates."""

    def change(self, function: Callable[..., object], rank: int, *beside: Tensor) -> bool:
        """Let `function(elements, *parts)` change `rank`'s memory in place. Atomic per element among accumulates.

        It is called for one piece after the other of all the memory and of the flat tensors `beside` it, which are as
        long, and must not communicate. Counts as a get and a put of all.

        Returns:
            False where that memory can't be changed from here, or a tensor lies on a device: nothing has happened.
        """
        return False

    @abc.abstractmethod
    def fetch_add(self, value: int, rank: int, offset: int = 0) -> int:
        """Add `value` to one element of an int64 window and return its former value. Atomic."""

    @abc.abstractmethod
    def compare_and_swap(self, expected: int, desired: int, rank: int, offset: int = 0) -> int:
        """Write `desired` if the int64 element equals `expected`; return its former value. Atomic."""

    @abc.abstractmethod
    def wait(
        self,
        predicate: Callable[[Tensor], bool],
        *,
        rank: int | None = None,
        offset: int = 0,
        count: int | None = None,
        what: str = "a change in a window",
        deadline_s: float | None = None,
    ) -> None:
        """Block until `predicate(elements)` holds for elements [offset, offset + count) of `rank` (default: own).

        The predicate must not communicate and must not change the tensor. `what` says in words what is awaited and
        of whom, for error messages. Past `deadline_s` (default: the communicator's) DeadlineError is raised.
        """


class Put(NamedTuple):
    """The arguments of `Memory.put`, for `RankMemory.put_all`."""

    window: Memory
    values: Tensor
    rank: int
    offset: int


def refuse_attached(*args: Any, **options: Any) -> NoReturn:
    """Raise CommunicationError for a call that memory attached by `RankMemory.attach` does not have."""
    raise CommunicationError("an attached window must be used for get and put only. Make one with comm.window.")


def out_of_range(rank: int, length: int, offset: int, count: int) -> CommunicationError:
    """Make the error for a call that addresses elements beyond a rank's memory."""
    return CommunicationError(
        f"elements of a window call must lie within rank {rank}'s {length} elements; got [{offset}, {offset + count})."
    )
