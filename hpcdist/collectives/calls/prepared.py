"""Collective calls by slots, prepared by shape: what is found out at a call serves all later ones like it.

A training loop makes the same calls at every step. torch takes one to three microseconds to view, copy or add a
tensor, however short, and NumPy a third. So a prepared call works on NumPy's arrays of the tensors and of the slots;
where NumPy can't combine a dtype, on torch's tensors. Long tensors pass in segments of a slot.
"""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter as clock
from typing import Any, TypeVar

import torch
from torch import Tensor

from hpcdist.collectives.calls.reduction import array_reduction, reduction
from hpcdist.collectives.tuning.timing import Trial
from hpcdist.comm.chunks import slices
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.slots import GatheredRows, Rows, Slots, array_of

SLICED_BYTES = 1 << 15  # of longer tensors, each of three ranks or more adds up a slice, and they share the slices
KNOWN = 512  # values that `remember` keeps
K = TypeVar("K")
V = TypeVar("V")

Data = Any  # an array, or a tensor: what is done with them is written alike
Step = Callable[[], object]
Met = tuple[GatheredRows, Step]  # what ranks have shown when they meet, and what each does then
Bind = Callable[..., tuple[Step, Sequence[Met]]]  # gets the call's number and its tensors' data; returns its steps
View = Callable[[Tensor], Data]
Combine = Callable[[Sequence[Data], Data], Step]  # makes the step that combines the ranks' data


def remember(known: dict[K, V], key: K, value: V) -> V:
    """Keep a value among others, and return it; there are not more than KNOWN."""
    if len(known) >= KNOWN:
        known.clear()
    known[key] = value
    return value


class PreparedCall(abc.ABC):
    """A collective call on dense tensors on the host, of one shape."""

    @abc.abstractmethod
    def __call__(self, *tensors: Tensor) -> bool:
        """Collective. Make the call; return False where ranks differ, and nothing has been changed."""

    def bound(self, *tensors: Tensor) -> Callable[[], bool] | None:
        """Return what makes the call on the memory of these tensors, if that is faster.

        It does not keep them: whoever calls it has tensors at the same addresses.
        """
        return None


class TriedCall(PreparedCall):
    """A call that is made in the fastest way, once that is known.

    Args:
        variants: which all do the same.
        trial: of all calls of about this length.
    """

    def __init__(self, variants: Sequence[PreparedCall], trial: Trial):
        self._variants, self._trial = variants, trial

    def __call__(self, *tensors: Tensor) -> bool:
        start = clock()
        if not self._variants[self._trial.variant](*tensors):
            return False
        self._trial.record(clock() - start)
        return True


class SlotCall(PreparedCall):
    """A call through slots.

    Args:
        fingerprint: what stands for the call; see `Slots.synchronize`.
        views: of each tensor: what views its data.
        segments: what the call does with each piece of the data, along their last axis.
        fetched: bytes that are counted.
    """

    def __init__(
        self, slots: Slots, comm: Communicator, fingerprint: int, views: Sequence[View],
        segments: Sequence[tuple[slice, Bind]], fetched: int,
    ):  # fmt: skip
        self._slots, self._traffic, self._fingerprint = slots, comm.trace.traffic, fingerprint
        self._views, self._segments, self._fetched = views, segments, fetched
        self._seen: dict[tuple[int, ...], bool] = {}  # addresses

    def __call__(self, *tensors: Tensor) -> bool:
        start, before_s, slots = clock(), self._traffic.communicating_s, self._slots
        data = [view(tensor) for view, tensor in zip(self._views, tensors)]
        for cut, bind in self._segments:
            chunks = data if len(self._segments) == 1 else [one[..., cut] for one in data]
            first, others = bind(slots.calls, *chunks)
            first()
            for gathered, step in others:
                if not slots.synchronize(self._fingerprint, gathered):
                    return False
                step()
        self._traffic.bytes_fetched += self._fetched
        self._traffic.communicating_s = before_s + clock() - start
        return True

    def bound(self, *tensors: Tensor) -> Callable[[], bool] | None:
        # It takes half the time of a call on tensors that have to be viewed first, but is worth making only for tensors
        # that come again.
        place = tuple(tensor.data_ptr() for tensor in tensors)
        if len(self._segments) > 1 or not self._seen.get(place):
            remember(self._seen, place, True)
            return None
        slots, fingerprint, synchronize, traffic, fetched = (
            self._slots,
            self._fingerprint,
            self._slots.synchronize,
            self._traffic,
            self._fetched,
        )
        data = [view(_memory_of(tensor)) for view, tensor in zip(self._views, tensors)]
        ((_, bind),) = self._segments
        kept: list[tuple[Step, Sequence[Met]] | None] = [None] * slots.period

        def call() -> bool:
            start, before_s, at = clock(), traffic.communicating_s, slots.calls % slots.period
            steps = kept[at]
            if steps is None:
                steps = kept[at] = bind(slots.calls, *data)
            steps[0]()
            for gathered, step in steps[1]:
                if not synchronize(fingerprint, gathered):
                    return False
                step()
            traffic.bytes_fetched += fetched
            traffic.communicating_s = before_s + clock() - start
            return True

        return call


class PreparedCalls:
    """Prepares calls over a communicator's slots, which count in its account of traffic.

    Args, of all methods:
        fingerprint: what stands for the call; see `Slots.synchronize`.
        count: elements that a rank brings, for each rank where it brings parts.
    """

    def __init__(self, slots: Slots, comm: Communicator):
        self.slots, self.comm, self.rank, self.size = slots, comm, slots.rank, slots.size

    def all_reduce(self, fingerprint: int, dtype: torch.dtype, count: int, operation: str) -> SlotCall:
        """Prepare the all-reduce of a tensor.

        The bytes counted are those of a ring, 2n(p-1)/p, as for MPI's own: reading memory of the node is no traffic,
        and the figure of a run must not depend on which of them is chosen.
        """
        combine, arrays, view = _combining(operation, dtype)

        def whole(place: Rows, own: Data) -> tuple[Step, Sequence[Met]]:
            addends = rows = place.rows
            if len(rows) == 2:  # the own tensor is read where it lies
                addends = [rows[0], own] if self.rank else [own, rows[1]]
            return _copy(own, rows[self.rank]), [(place.gathered, combine(addends, own))]

        def of_length(length: int) -> Bind:
            if self.size > 2 and length * dtype.itemsize > SLICED_BYTES:
                return self._sliced(dtype, length, combine, arrays)
            return self._in_one_place(whole, dtype, arrays=arrays)(length)

        fetched = 2 * (self.size - 1) * count * dtype.itemsize // self.size
        return self._call(fingerprint, dtype, count, of_length, [view], fetched)

    def _sliced(self, dtype: torch.dtype, length: int, combine: Combine, arrays: bool) -> Bind:
        """Combine a slice on each rank, and share the slices; every rank combines what is left over."""
        rank, size, count = self.rank, self.size, length // self.size
        places, totals = self.slots.row_buffers(dtype, length, arrays), self.slots.row_buffers(dtype, count, arrays)
        mine, end = slice(rank * count, (rank + 1) * count), size * count

        def bind(number: int, own: Data) -> tuple[Step, Sequence[Met]]:
            rows, total = places[number].rows, totals[number + 1]
            combined = combine([row[mine] for row in rows], total.rows[rank])
            if end < length:
                combined = _both(combined, combine([row[end:] for row in rows], own[end:]))
            found = _copy(total.table, own[:end].reshape(size, count))
            return _copy(own, rows[rank]), [(places[number].gathered, combined), (total.gathered, found)]

        return bind

    def broadcast(self, fingerprint: int, dtype: torch.dtype, count: int, root: int) -> SlotCall:
        leads = self.rank == root

        def bind(place: Rows, own: Data) -> tuple[Step, Sequence[Met]]:
            row, gathered = place.rows[root], place.gathered._replace(source=root)
            return (_copy(own, row), [(gathered, _nothing)]) if leads else (_nothing, [(gathered, _copy(row, own))])

        fetched = 0 if leads else (self.size - 1) * count * dtype.itemsize
        return self._call(fingerprint, dtype, count, self._in_one_place(bind, dtype), [array_of], fetched)

    def all_gather(self, fingerprint: int, dtype: torch.dtype, count: int) -> SlotCall:
        """Prepare an all-gather into a tensor of equal parts; its tensors come in the order of the call's."""

        def bind(place: Rows, out: Data, own: Data) -> tuple[Step, Sequence[Met]]:
            return _copy(own, place.rows[self.rank]), [(place.gathered, _copy(place.table, out))]

        fetched, views = (self.size - 1) * count * dtype.itemsize, [self._in_parts(array_of), array_of]
        return self._call(fingerprint, dtype, count, self._in_one_place(bind, dtype), views, fetched)

    def all_to_all(self, fingerprint: int, dtype: torch.dtype, count: int) -> SlotCall:
        """Prepare an exchange of equal parts between two tensors."""
        rank, size = self.rank, self.size

        def bind(place: Rows, out: Data, given: Data) -> tuple[Step, Sequence[Met]]:
            parts, gathered = place.parts, place.gathered
            if size > 2:
                return _copy(given, parts[rank]), [(gathered, _copy(parts[:, rank], out))]
            other = 1 - rank
            found = _both(_copy(parts[other, rank], out[other]), _copy(given[rank], out[rank]))
            return _copy(given[other], parts[rank, other]), [(gathered, found)]

        fetched, views = (size - 1) * count * dtype.itemsize, [self._in_parts(array_of)] * 2
        return self._call(fingerprint, dtype, count, self._in_one_place(bind, dtype, size), views, fetched, size)

    def reduce_scatter(self, fingerprint: int, dtype: torch.dtype, count: int, operation: str) -> SlotCall:
        """Prepare a reduction of equal parts of a tensor."""
        rank, size = self.rank, self.size
        combine, arrays, view = _combining(operation, dtype)

        def bind(place: Rows, out: Data, given: Data) -> tuple[Step, Sequence[Met]]:
            parts, gathered = place.parts, place.gathered
            addends = list(parts[:, rank])
            if size > 2:
                return _copy(given, parts[rank]), [(gathered, combine(addends, out))]
            addends[rank] = given[rank]  # of two ranks the own part is read where it lies
            return _copy(given[1 - rank], parts[rank, 1 - rank]), [(gathered, combine(addends, out))]

        of_length, fetched = self._in_one_place(bind, dtype, size, arrays), (size - 1) * count * dtype.itemsize
        return self._call(fingerprint, dtype, count, of_length, [view, self._in_parts(view)], fetched, size)

    def _in_one_place(
        self, bind: Callable[..., tuple[Step, Sequence[Met]]], dtype: torch.dtype, parts: int = 1, arrays: bool = True
    ) -> Callable[[int], Bind]:
        """Let `bind` get the place of the rows, of so many parts each, instead of the call's number."""

        def of_length(length: int) -> Bind:
            places = self.slots.row_buffers(dtype, parts * length, arrays)
            return lambda number, *data: bind(places[number], *data)

        return of_length

    def _in_parts(self, view: View) -> View:
        return lambda tensor: view(tensor).reshape(self.size, -1)

    def _call(
        self, fingerprint: int, dtype: torch.dtype, count: int, of_length: Callable[[int], Bind], views: Sequence[View],
        fetched: int, parts: int = 1,
    ) -> SlotCall:  # fmt: skip
        """Cut so many elements, of each of a rank's parts, into segments that fit into a slot together."""
        step = self.slots.n_bytes // dtype.itemsize // parts
        cuts = list(slices(count, step))
        made = {length: of_length(length) for length in {cut.stop - cut.start for cut in cuts}}
        segments = [(cut, made[cut.stop - cut.start]) for cut in cuts]
        return SlotCall(self.slots, self.comm, fingerprint, views, segments, fetched if self.slots.counted else 0)


def _combining(operation: str, dtype: torch.dtype) -> tuple[Combine, bool, View]:
    """Return what makes the step that combines the ranks' data; whether these are arrays; and what views them."""
    by_arrays = array_reduction(operation, dtype)
    if by_arrays is not None:
        return by_arrays, True, array_of
    reduce = reduction(operation, dtype)
    return lambda rows, out: partial(reduce, rows, out), False, lambda tensor: tensor.detach().view(-1)


def _copy(source: Data, into: Data) -> Step:
    return partial(into.__setitem__, ..., source)


def _both(first: Step, second: Step) -> Step:
    def both() -> None:
        first()
        second()

    return both


def _nothing() -> None:
    pass


def _memory_of(tensor: Tensor) -> Tensor:
    """View a dense tensor's elements, flat, in a tensor that does not keep them in memory."""
    return torch.frombuffer((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()), dtype=tensor.dtype)
