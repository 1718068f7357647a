"""Memory that other ranks read and change: `Memory` has get and put, `Window` atomic operations and waiting too."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from hpcdist.comm.transfer import Traffic, addable, check_flat, check_rank
from hpcdist.errors import CommunicationError

Predicate = Callable[[Tensor], bool]


class Memory(abc.ABC):
    """Memory that every rank of a communicator can read and write without its owner taking part.

    Each call is an epoch of its own (passive target): when it returns, the transfer is complete at both ends.
    `offset` counts elements. Single elements are never torn; a longer `get` that overlaps another rank's `put` may
    mix old and new elements. For a consistent read use `hpcdist.comm.snapshot`.

    The public calls check their arguments here, and count what they move; subclasses define what they do then.

    Args:
        local: this rank's exposed memory.
        lengths: elements of each rank's memory.
        rank: this one.
        traffic: the account of the calls.
    """

    local: Tensor  # this rank's exposed memory, flat; others may change it at any time

    def __init__(self, local: Tensor, lengths: Sequence[int], rank: int, traffic: Traffic):
        self.local, self._lengths, self._closed = local, lengths, False
        self._own_rank, self._traffic = rank, traffic

    def get(self, out: Tensor, rank: int, offset: int = 0) -> None:
        """Copy `len(out)` elements of `rank`'s memory, from `offset` on, into `out` (overwritten)."""
        self._check(rank, offset, out)
        self._get(out, rank, offset)
        if rank != self._own_rank:
            self._traffic.fetched(out.nbytes)

    def read(self, rank: int, offset: int, count: int, out: Tensor | None = None) -> Tensor:
        """Return `count` elements of `rank`'s memory: a view if that memory is mapped here, else a copy.

        Not to be written; what lies in place stays what it is only until somebody changes it there.

        Args:
            out: memory for the copy, shape (count,); new if None.
        """
        memory = self._mapped(rank)
        if memory is None:
            out = torch.empty(count, dtype=self.local.dtype) if out is None else out
            self.get(out, rank, offset)
            return out
        self._check(rank, offset, count=count)
        part = memory[offset : offset + count]
        if rank != self._own_rank:
            self._traffic.fetched(part.nbytes)
        return part

    def _mapped(self, rank: int) -> Tensor | None:
        """Return a rank's memory as it is now, if it is mapped here."""
        return None

    def put(self, values: Tensor, rank: int, offset: int = 0) -> None:
        """Copy `values` into `rank`'s memory from `offset` on."""
        self._check(rank, offset, values)
        self._put(values, rank, offset)
        if rank != self._own_rank:
            self._traffic.sent(values.nbytes)

    @abc.abstractmethod
    def _get(self, out: Tensor, rank: int, offset: int) -> None:
        """Do what `get` says."""

    @abc.abstractmethod
    def _put(self, values: Tensor, rank: int, offset: int) -> None:
        """Do what `put` says."""

    def _check(self, rank: int, offset: int, tensor: Tensor | None = None, count: int | None = None) -> int:
        """Check a call's arguments; return its number of elements: of `tensor`, or `count`, or all from `offset` on."""
        if self._closed:
            raise CommunicationError("a window must not be used once it is closed. Close it after its last use.")
        lengths = self._lengths
        if not 0 <= rank < len(lengths):
            check_rank(rank, len(lengths), "rank of a window")
        length = lengths[rank]
        if tensor is not None:
            check_flat(tensor)
            count = tensor.numel()
            if tensor.dtype != self.local.dtype:
                raise CommunicationError(
                    f"dtype must be that of the window, {self.local.dtype}; got {tensor.dtype}. Convert the tensor."
                )
        elif count is None:
            count = length - offset
        if offset < 0 or count < 0 or offset + count > length:
            raise CommunicationError(
                f"elements of a window call must lie within rank {rank}'s {length} elements; got "
                f"[{offset}, {offset + count})."
            )
        return count

    @abc.abstractmethod
    def close(self) -> None:
        """Release the memory; `local` must not be used afterwards. Collective for a window."""

    def _release(self) -> None:
        """Forget the memory."""
        self._closed = True
        del self.local


class Window(Memory):
    """Memory that ranks can also add to, change atomically and wait on."""

    def accumulate(self, values: Tensor, rank: int, offset: int = 0) -> None:
        """Add `values` to `rank`'s memory from `offset` on. Atomic per element among accumulates."""
        self._check(rank, offset, values)
        addable(values)  # else it is refused
        self._accumulate(values, rank, offset)
        if rank != self._own_rank:
            self._traffic.sent(values.nbytes)

    def change(self, function: Callable[..., object], rank: int, *beside: Tensor) -> bool:
        """Let `function(elements, *parts)` change `rank`'s memory in place. Atomic per element among accumulates.

        It is called for one piece after the other of all the memory and of the flat tensors `beside` it, which are as
        long, and must not communicate. Counts as a get and a put of all.

        Returns:
            False where that memory can't be changed from here, or a tensor lies on a device: nothing has happened.
        """
        return False

    def fetch_add(self, value: int, rank: int, offset: int = 0) -> int:
        """Add `value` to one element of an int64 window and return its former value. Atomic."""
        return self._checked_atomic("fetch_add", rank, offset, value)

    def compare_and_swap(self, expected: int, desired: int, rank: int, offset: int = 0) -> int:
        """Write `desired` if the int64 element equals `expected`; return its former value. Atomic."""
        return self._checked_atomic("compare_and_swap", rank, offset, expected, desired)

    def _checked_atomic(self, what: str, rank: int, offset: int, *values: int) -> int:
        self._check(rank, offset, count=1)
        if self.local.dtype != torch.int64:
            raise CommunicationError(f"{what} must be used on an int64 window; got a window of {self.local.dtype}.")
        for value in values:
            if not -(2**63) <= value < 2**63:
                raise CommunicationError(f"operand of an atomic must fit in 64 bits; got {value}.")
        before = self._atomic(what, rank, offset, *values)
        if rank != self._own_rank:
            self._traffic.sent(self.local.itemsize)
        return before

    def wait(
        self,
        predicate: Predicate,
        *,
        rank: int | None = None,
        offset: int = 0,
        count: int | None = None,
        what: str = "a change in a window",
        deadline_s: float | None = None,
        by: Collection[int] = (),
    ) -> None:
        """Block until `predicate(elements)` holds for elements [offset, offset + count) of `rank` (default: own).

        The predicate must not communicate and must not change the tensor. `what` says in words what is awaited and
        of whom, for error messages. Past `deadline_s` (default: the communicator's) DeadlineError is raised.

        `by` are the ranks of which one must act for the predicate to become true, if that is known. Where none of them
        ever will, for their scripts have ended, or they wait for this rank, the job ends at once. The predicate is then
        called by another thread too.
        """
        rank = self._own_rank if rank is None else rank
        self._wait(predicate, rank, offset, self._check(rank, offset, count=count), what, deadline_s, by)

    @abc.abstractmethod
    def _accumulate(self, values: Tensor, rank: int, offset: int) -> None:
        """Do what `accumulate` says."""

    @abc.abstractmethod
    def _atomic(self, what: str, rank: int, offset: int, *values: int) -> int:
        """Do what `fetch_add` (of one value) or `compare_and_swap` (expected, desired) says."""

    @abc.abstractmethod
    def _wait(
        self, predicate: Predicate, rank: int, offset: int, count: int, what: str, limit_s: float | None,
        by: Collection[int],
    ) -> None:  # fmt: skip
        """Do what `wait` says."""


class Put(NamedTuple):
    """The arguments of `Memory.put`, for `RankMemory.put_all`."""

    window: Memory
    values: Tensor
    rank: int
    offset: int


def atomic(what: str, before: int, *values: int) -> int:
    """Return what an int64 element is after `fetch_add` (of one value) or `compare_and_swap` (expected, desired)."""
    if what == "fetch_add":
        return (before + values[0] + _HALF) % (2 * _HALF) - _HALF  # it wraps around
    return values[1] if before == values[0] else before


_HALF = 1 << 63


def refuse_attached(*args: Any, **options: Any) -> NoReturn:
    """Raise CommunicationError for a call that memory attached by `RankMemory.attach` does not have."""
    raise CommunicationError("an attached window must be used for get and put only. Make one with comm.window.")


def check_count(count: int) -> None:
    """Check the number of elements of a new window; raise CommunicationError otherwise."""
    if count < 0:
        raise CommunicationError(f"count of a window must be at least 0; got {count}.")
