"""One-sided communication: `Memory` has get and put; `Window` adds atomic operations and waiting."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hpcdist.comm.transfer import Traffic, addable, check_flat, check_rank
from hpcdist.errors import CommunicationError

Predicate = Callable[[Tensor], bool]


class Memory(abc.ABC):
    """Memory that every rank of a communicator can read and write without its owner taking part.

    Each call is one epoch (passive target): when it returns, the transfer is complete at both ends. `offset` counts
    elements. Single elements are never torn; a longer `get` that overlaps another rank's `put` may mix old and new
    elements. For a consistent read use `hpcdist.comm.snapshot`.

    The public methods check arguments and count bytes; subclasses implement `_get`, `_put`...

    Args:
        lengths: number of elements of each rank's memory.
        traffic: counts the bytes of the calls.
    """

    local: Tensor  # this rank's exposed memory, flat; others may change it at any time

    def __init__(self, local: Tensor, lengths: Sequence[int], rank: int, traffic: Traffic):
        self.local, self._lengths, self._closed = local, lengths, False
        self._rank, self._traffic = rank, traffic

    def get(self, out: Tensor, rank: int, offset: int = 0) -> None:
        """Copy elements [offset, offset + len(out)) of `rank`'s memory into `out` (overwritten)."""
        self._check(rank, offset, out)
        self._get(out, rank, offset)
        if rank != self._rank:
            self._traffic.fetched(out.nbytes)

    def read(self, rank: int, offset: int, count: int, out: Tensor | None = None) -> Tensor:
        """Return `count` elements of `rank`'s memory: a view if this process maps that memory, else a copy.

        Do not write to it. A view changes when any rank changes the memory.

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
        if rank != self._rank:
            self._traffic.fetched(part.nbytes)
        return part

    def _mapped(self, rank: int) -> Tensor | None:
        """Return a view of a rank's memory if this process maps it, else None."""
        return None

    def put(self, values: Tensor, rank: int, offset: int = 0) -> None:
        """Copy `values` into `rank`'s memory, starting at `offset`."""
        self._check(rank, offset, values)
        self._put(values, rank, offset)
        if rank != self._rank:
            self._traffic.sent(values.nbytes)

    @abc.abstractmethod
    def _get(self, out: Tensor, rank: int, offset: int) -> None:
        """Implement `get`; arguments have been checked."""

    @abc.abstractmethod
    def _put(self, values: Tensor, rank: int, offset: int) -> None:
        """Implement `put`; arguments have been checked."""

    def _check(self, rank: int, offset: int, tensor: Tensor | None = None, count: int | None = None) -> int:
        """Check a call's arguments; return its number of elements: of `tensor`, or `count`, or all after `offset`."""
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
                    f"dtype must be the window's, {self.local.dtype}; got {tensor.dtype}. Convert the tensor."
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
        self._closed = True
        del self.local


class Window(Memory):
    """Memory that other ranks can also accumulate into, change atomically and wait on."""

    def accumulate(self, values: Tensor, rank: int, offset: int = 0) -> None:
        """Add `values` to `rank`'s memory, starting at `offset`. Atomic per element among accumulates."""
        self._check(rank, offset, values)
        addable(values)  # raises for other dtypes
        self._accumulate(values, rank, offset)
        if rank != self._rank:
            self._traffic.sent(values.nbytes)

    def change(self, function: Callable[..., object], rank: int, *operands: Tensor) -> bool:
        """Change `rank`'s memory in place by `function(elements, *parts)`. Atomic per element towards `accumulate`.

        The function is called for consecutive chunks: `elements` of the memory and the matching part of each operand.
        Counts as a get and a put of the whole memory.

        Args:
            function: changes `elements` in place; must not communicate.
            operands: flat tensors as long as the memory.

        Returns:
            False, and nothing changes, if this rank can't change that memory in place or a tensor is on a device.
        """
        return False

    def fetch_add(self, value: int, rank: int, offset: int = 0) -> int:
        """Add `value` to one element of an int64 window and return the value before. Atomic."""
        return self._checked_atomic("fetch_add", rank, offset, value)

    def compare_and_swap(self, expected: int, desired: int, rank: int, offset: int = 0) -> int:
        """Write `desired` if the int64 element equals `expected`; return the value before. Atomic."""
        return self._checked_atomic("compare_and_swap", rank, offset, expected, desired)

    def _checked_atomic(self, what: str, rank: int, offset: int, *values: int) -> int:
        """Check the operands of an atomic operation, run it, count its bytes, and return the value before."""
        self._check(rank, offset, count=1)
        if self.local.dtype != torch.int64:
            raise CommunicationError(f"{what} must be used on an int64 window; got a window of {self.local.dtype}.")
        for value in values:
            if not -(2**63) <= value < 2**63:
                raise CommunicationError(f"operand of an atomic must fit in 64 bits; got {value}.")
        before = self._atomic(what, rank, offset, *values)
        if rank != self._rank:
            self._traffic.sent(self.local.itemsize)
        return before

    def wait(
        self, predicate: Predicate, *, rank: int | None = None, offset: int = 0, count: int | None = None,
        what: str = "a change in a window", deadline_s: float | None = None, by: Collection[int] = (),
    ) -> None:  # fmt: skip
        """Block until `predicate(elements)` is true for elements [offset, offset + count) of `rank`'s memory.

        Args:
            predicate: must not communicate or change the tensor; with `by` a second thread calls it, too.
            rank: by default this rank.
            count: by default all elements after `offset`.
            what: describes the awaited event and who causes it, for error messages.
            deadline_s: DeadlineError is raised after these seconds; by default the communicator's.
            by: ranks of which one must act to make the predicate true, if known. If none of them can act any more (its
                script has ended, or it waits for this rank), the job ends immediately.
        """
        rank = self._rank if rank is None else rank
        self._wait(predicate, rank, offset, self._check(rank, offset, count=count), what, deadline_s, by)

    @abc.abstractmethod
    def _accumulate(self, values: Tensor, rank: int, offset: int) -> None:
        """Implement `accumulate`; arguments have been checked."""

    @abc.abstractmethod
    def _atomic(self, what: str, rank: int, offset: int, *values: int) -> int:
        """Implement `fetch_add` (one value) or `compare_and_swap` (expected, desired), as `what` says."""

    @abc.abstractmethod
    def _wait(
        self, predicate: Predicate, rank: int, offset: int, count: int, what: str, limit_s: float | None,
        by: Collection[int],
    ) -> None:  # fmt: skip
        """Implement `wait`; arguments have been checked."""


class Put(NamedTuple):
    """The arguments of `Memory.put`, for `RankMemory.put_all`."""

    window: Memory
    values: Tensor
    rank: int
    offset: int


def atomic(what: str, before: int, *values: int) -> int:
    """Return the new value of an int64 element after `fetch_add` (one value) or `compare_and_swap`."""
    if what == "fetch_add":
        return (before + values[0] + _HALF) % (2 * _HALF) - _HALF  # it wraps around
    return values[1] if before == values[0] else before


_HALF = 1 << 63
