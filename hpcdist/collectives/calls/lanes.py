"""Short collective calls inside a node, prepared: what was found out at a call is kept for others on the same memory.

A training loop makes the same calls on the same tensors at every step. torch takes about a microsecond to view, copy or
add a tensor, however short; Python's own views of that memory, and NumPy's sums, take a third. So a lane holds such
views of a call's tensors, by their address. It does what the call does elsewhere, meeting for meeting: one rank may
take a lane while another does not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter as clock
from typing import TypeVar

import torch
from torch import Tensor

from hpcdist.collectives.calls.reduction import array_function, reduction
from hpcdist.comm.capabilities import Shown, Slots
from hpcdist.comm.communicator import Communicator

Lane = Callable[[], bool]  # makes the call; False where ranks differ, and nothing has been changed
Takes = tuple[Callable[[], object], Callable[[], object]]  # of the two turns
KNOWN = 512  # lanes that are kept
K = TypeVar("K")
V = TypeVar("V")


def plain(tensor: object) -> bool:
    """Tell whether a tensor is its elements in the host's memory, one after the other."""
    return isinstance(tensor, Tensor) and tensor.is_cpu and is_dense(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor is its elements in some memory, one after the other. An address tells the device's from
    the host's."""
    return tensor.is_contiguous() and not tensor.is_neg()


def place(tensor: Tensor) -> tuple[int, torch.dtype, torch.Size]:
    """Say where a tensor lies, and what: a dense one of the same place is the same memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape


def remember(known: dict[K, V], key: K, lane: V) -> None:
    """Keep a lane among others; there are not more than KNOWN."""
    if len(known) >= KNOWN:
        known.clear()
    known[key] = lane


def memory_of(tensor: Tensor) -> Tensor:
    """View a plain tensor's elements, flat, in a tensor that does not keep them in memory."""
    return torch.frombuffer((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()), dtype=tensor.dtype)


class Lanes:
    """Makes lanes over a communicator's slots, which count in its account of traffic."""

    def __init__(self, slots: Slots, comm: Communicator):
        self.slots, self.traffic = slots, comm.trace.traffic

    def all_reduce(self, note: int, tensor: Tensor, operation: str) -> Lane:
        """Return the lane of a tensor's all-reduce.

        The bytes counted are those of a ring, 2n(p-1)/p, as for MPI's own: reading memory of the node is no traffic,
        and the figure of a run must not depend on which of them is chosen.
        """
        own = memory_of(tensor)
        shown, size = self.slots.views(own.dtype, len(own)), self.slots.size
        lane = self._combining(operation, own, own, shown)
        return self._lane(note, own, shown, lane, 2 * (size - 1) * own.nbytes // size)

    def broadcast(self, note: int, tensor: Tensor, root: int) -> Lane:
        own, leads = memory_of(tensor), self.slots.rank == root
        shown = self.slots.views(own.dtype, len(own))
        first, second = (partial(_bytes(own).__setitem__, slice(None), _bytes(of.rows[root])) for of in shown)
        return self._lane(note, own if leads else None, shown, None if leads else (first, second))

    def all_gather(self, note: int, out: Tensor, tensor: Tensor) -> Lane:
        own = memory_of(tensor)
        shown = self.slots.views(own.dtype, len(own))
        return self._lane(note, own, shown, self._copying(out, shown))

    def reduce_scatter(self, note: int, out: Tensor, given: Tensor, operation: str) -> Lane:
        own, into = memory_of(given), memory_of(out)
        shown, part = self.slots.views(own.dtype, len(own)), own.view(self.slots.size, -1)[self.slots.rank]
        return self._lane(note, own, shown, self._combining(operation, part, into, self._parts(shown, len(into))))

    def all_to_all(self, note: int, out: Tensor, given: Tensor) -> Lane:
        own = memory_of(given)
        shown = self.slots.views(own.dtype, len(own))
        return self._lane(note, own, shown, self._copying(out, self._parts(shown, len(own) // self.slots.size)))

    # --- what lanes are made of ---------------------------------------------------------------------------------------
    def _lane(
        self, note: int, own: Tensor | None, shown: Sequence[Shown], takes: Takes | None, fetched: int | None = None
    ) -> Lane:
        """Make a lane.

        Args:
            own: what this rank brings, if it does.
            takes: what is done with the slots of each turn once they are full; None: nothing.
            fetched: bytes that are counted; by default those of the others' rows.
        """
        slots, meet, traffic = self.slots, self.slots.meet, self.traffic
        rows = [_bytes(of.rows[slots.rank]) for of in shown]
        source = None if own is None else _bytes(own)
        n_bytes = (slots.size - 1) * shown[0].rows[0].nbytes * bool(takes) if fetched is None else fetched

        def lane() -> bool:
            start, turn = clock(), slots.turn
            if source is not None:
                rows[turn][:] = source
            if not meet(note):
                return False
            if takes is not None:
                takes[turn]()
            traffic.bytes_fetched += n_bytes
            traffic.communicating_s += clock() - start
            return True

        return lane

    def _combining(self, operation: str, own: Tensor, out: Tensor, shown: Sequence[Shown]) -> Takes:
        """Return what combines all ranks' rows into `out`; of two ranks' the own one is read where it lies."""
        function, rank = array_function(operation, out.dtype), self.slots.rank
        if function is not None and self.slots.size == 2:
            others = [of.rows[1 - rank].numpy() for of in shown]
            pairs = [(own.numpy(), other) if rank == 0 else (other, own.numpy()) for other in others]
            first, second = (partial(function, *pair, out.numpy()) for pair in pairs)
        else:
            combine = reduction(operation, out.dtype)
            first, second = (partial(combine, of.rows, out) for of in shown)
        return first, second

    def _copying(self, out: Tensor, shown: Sequence[Shown]) -> Takes:
        parts = list(memory_of(out).view(self.slots.size, -1))
        pairs = [[(_bytes(part), _bytes(row)) for part, row in zip(parts, of.rows, strict=True)] for of in shown]
        first, second = (partial(_copy, of_turn) for of_turn in pairs)
        return first, second

    def _parts(self, shown: Sequence[Shown], count: int) -> list[Shown]:
        """Cut this rank's part of so many elements out of all ranks' rows."""
        start = self.slots.rank * count
        return [Shown(table, list(table)) for table in (of.table[:, start : start + count] for of in shown)]


def _copy(pairs: Sequence[tuple[memoryview, memoryview]]) -> None:
    for into, memory in pairs:
        into[:] = memory


def _bytes(tensor: Tensor) -> memoryview:
    """View a flat tensor as bytes."""
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]
