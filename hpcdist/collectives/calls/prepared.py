"""Collective calls prepared once per shape, and reused by later calls with the same shapes: through slots, or by MPI.

A training loop repeats the same calls at every step. torch takes one to three microseconds to view, copy or add a
tensor, however short, and NumPy a third. So a call through slots works on NumPy arrays of the tensors and the slots, or
on torch tensors if NumPy can't combine the dtype. Long tensors pass in segments of a slot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter as clock
from typing import Any, TypeVar

import torch
from torch import Tensor

from hpcdist.collectives.base import Scratch
from hpcdist.collectives.calls.exchange import MESSAGE_BYTES
from hpcdist.collectives.calls.reduction import array_reduction, reduction
from hpcdist.collectives.tuning.timing import Trial
from hpcdist.comm.chunks import slices
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.slots import GatheredRows, Rows, Slots, array_of

SLICED_BYTES = 1 << 15  # of longer tensors on three ranks or more, each rank reduces a slice and shares the result
# Dtypes that MPI sums fast.
SUMMED = {torch.float32, torch.float64, torch.int32, torch.int64, torch.complex64, torch.complex128}
KNOWN = 512  # maximum number of values that `remember` keeps
K = TypeVar("K")
V = TypeVar("V")

# A collective call on dense tensors on the host, of one shape. It returns False, with nothing changed, if the ranks'
# calls differ.
PreparedCall = Callable[..., bool]
Data = Any  # an array or a tensor: the code is the same for both
Step = Callable[[], object]  # one part of a call, such as a copy or a sum, on given memory
Exchanged = tuple[GatheredRows, Step]  # rows to publish in a `synchronize`, and the step that follows it
# (number of the call, its data) -> the step that writes the local row, and what follows it. Later calls on the same
# memory reuse the steps if their numbers are equal modulo `Slots.period`.
Bind = Callable[..., tuple[Step, Sequence[Exchanged]]]
View = Callable[[Tensor], Data]
Combine = Callable[[Sequence[Data], Data], Step]  # returns the step that combines the ranks' data


def remember(known: dict[K, V], key: K, value: V) -> V:
    """Store a value in a cache of at most KNOWN entries, and return it."""
    if len(known) >= KNOWN:
        known.clear()
    known[key] = value
    return value


def fastest_of(variants: Sequence[PreparedCall], trial: Trial) -> PreparedCall:
    """Return a call that times the variants of a call while in use, and then uses the fastest.

    Args:
        trial: chooses the variant, for all calls of about this length.
    """

    def call(*tensors: Tensor) -> bool:
        start = clock()
        agreed = variants[trial.variant](*tensors)
        if agreed:
            trial.record(clock() - start)
        return agreed

    return call


class SlotCall:
    """A prepared call through slots.

    Args:
        fingerprint: identifies the call; see `Slots.synchronize`.
        views: for each argument, the function that views a tensor's data.
        segments: slices of the data's last axis, each with its `Bind`.
        fetched: bytes that a call adds to the traffic.
    """

    def __init__(
        self, slots: Slots, comm: Communicator, fingerprint: int, views: Sequence[View],
        segments: Sequence[tuple[slice, Bind]], fetched: int,
    ):  # fmt: skip
        self._slots, self._traffic, self._fingerprint = slots, comm.trace.traffic, fingerprint
        self._views, self._segments, self._fetched = views, segments, fetched
        self._seen: dict[tuple[int, ...], bool] = {}  # by the tensors' addresses

    def __call__(self, *tensors: Tensor) -> bool:
        before_s, slots = self._traffic.communicating_s, self._slots
        start = clock() - self._traffic.waiting_s  # waiting for ranks in the call is not communicating
        data = [view(tensor) for view, tensor in zip(self._views, tensors)]
        for segment, bind in self._segments:
            parts = data if len(self._segments) == 1 else [array[..., segment] for array in data]
            write, exchanges = bind(slots.calls, *parts)
            write()
            for gathered, step in exchanges:
                if not slots.synchronize(self._fingerprint, gathered):
                    return False
                step()
        self._traffic.bytes_fetched += self._fetched
        # Set: messages across nodes added to it, too.
        self._traffic.communicating_s = before_s + max(0.0, clock() - self._traffic.waiting_s - start)
        return True

    def bound(self, *tensors: Tensor) -> Callable[[], bool] | None:
        """Return a faster function for calls on tensors at these addresses, or None. It does not keep them alive."""
        # A bound call takes half the time of one that has to view the tensors first, but is worth creating only for
        # tensors that are used again: from the second call at the same addresses.
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        if len(self._segments) > 1 or not self._seen.get(addresses):
            remember(self._seen, addresses, True)
            return None
        slots, fingerprint, traffic, fetched = self._slots, self._fingerprint, self._traffic, self._fetched
        synchronize = slots.synchronize
        data = [view(_memory_of(tensor)) for view, tensor in zip(self._views, tensors)]
        ((_, bind),) = self._segments
        steps_of: list[tuple[Step, Sequence[Exchanged]] | None] = [None] * slots.period  # by the slots' buffer

        def call() -> bool:
            before_s, index = traffic.communicating_s, slots.calls % slots.period
            start = clock() - traffic.waiting_s
            steps = steps_of[index]
            if steps is None:
                steps = steps_of[index] = bind(slots.calls, *data)
            steps[0]()
            for gathered, step in steps[1]:
                if not synchronize(fingerprint, gathered):
                    return False
                step()
            traffic.bytes_fetched += fetched
            traffic.communicating_s = before_s + max(0.0, clock() - traffic.waiting_s - start)
            return True

        return call


class PreparedCalls:
    """Prepares calls through slots; their bytes count in the communicator's traffic.

    Args of all methods:
        fingerprint: identifies the call; see `Slots.synchronize`.
        count: number of elements of a rank's input; of each part if the input has a part for each rank.
    """

    def __init__(self, slots: Slots, comm: Communicator):
        self.slots, self.comm, self.rank, self.size = slots, comm, slots.rank, slots.size

    def all_reduce(self, fingerprint: int, dtype: torch.dtype, count: int, operation: str) -> SlotCall:
        """Prepare the all-reduce of a tensor; its traffic counts as a ring's, 2n(p-1)/p bytes, like MPI's."""
        combine, arrays, view = _combining(operation, dtype)

        def whole(buffer: Rows, local: Data) -> tuple[Step, Sequence[Exchanged]]:
            addends = rows = buffer.rows
            if len(rows) == 2:  # read the local addend from the tensor, which is in the cache
                addends = [rows[0], local] if self.rank else [local, rows[1]]
            return _copy(local, rows[self.rank]), [(buffer.gathered, combine(addends, local))]

        def of_length(length: int) -> Bind:
            if self.size > 2 and length * dtype.itemsize > SLICED_BYTES:
                return self._bind_sliced(dtype, length, combine, arrays)
            return self._with_buffer(whole, dtype, arrays=arrays)(length)

        fetched = 2 * (self.size - 1) * count * dtype.itemsize // self.size
        return self._call(fingerprint, dtype, count, of_length, [view], fetched)

    def _bind_sliced(self, dtype: torch.dtype, length: int, combine: Combine, arrays: bool) -> Bind:
        """Return the `Bind` that reduces a slice on each rank, then shares the slices; all reduce the remainder."""
        rank, size, count = self.rank, self.size, length // self.size
        inputs, totals = self.slots.row_buffers(dtype, length, arrays), self.slots.row_buffers(dtype, count, arrays)
        local_slice, end = slice(rank * count, (rank + 1) * count), size * count

        def bind(number: int, local: Data) -> tuple[Step, Sequence[Exchanged]]:
            rows, total = inputs[number].rows, totals[number + 1]  # the slots count each `synchronize` as a call
            combined = combine([row[local_slice] for row in rows], total.rows[rank])
            if end < length:
                combined = _both(combined, combine([row[end:] for row in rows], local[end:]))
            collect = _copy(total.table, local[:end].reshape(size, count))
            return _copy(local, rows[rank]), [(inputs[number].gathered, combined), (total.gathered, collect)]

        return bind

    def broadcast(self, fingerprint: int, dtype: torch.dtype, count: int, root: int) -> SlotCall:
        is_root = self.rank == root

        def bind(buffer: Rows, local: Data) -> tuple[Step, Sequence[Exchanged]]:
            row, gathered = buffer.rows[root], buffer.gathered._replace(source=root)
            return (
                (_copy(local, row), [(gathered, _nothing)]) if is_root else (_nothing, [(gathered, _copy(row, local))])
            )

        fetched = 0 if is_root else (self.size - 1) * count * dtype.itemsize
        return self._call(fingerprint, dtype, count, self._with_buffer(bind, dtype), [array_of], fetched)

    def all_gather(self, fingerprint: int, dtype: torch.dtype, count: int) -> SlotCall:
        """Prepare an all-gather into a tensor of equal parts; call it with (out, local)."""

        def bind(buffer: Rows, out: Data, local: Data) -> tuple[Step, Sequence[Exchanged]]:
            return _copy(local, buffer.rows[self.rank]), [(buffer.gathered, _copy(buffer.table, out))]

        fetched, views = (self.size - 1) * count * dtype.itemsize, [self._in_parts(array_of), array_of]
        return self._call(fingerprint, dtype, count, self._with_buffer(bind, dtype), views, fetched)

    def all_to_all(self, fingerprint: int, dtype: torch.dtype, count: int) -> SlotCall:
        """Prepare an all-to-all of equal parts; call it with (out, inputs)."""
        rank, size = self.rank, self.size

        def bind(buffer: Rows, out: Data, inputs: Data) -> tuple[Step, Sequence[Exchanged]]:
            parts, gathered = buffer.parts, buffer.gathered
            if size > 2:
                return _copy(inputs, parts[rank]), [(gathered, _copy(parts[:, rank], out))]
            other = 1 - rank
            collect = _both(_copy(parts[other, rank], out[other]), _copy(inputs[rank], out[rank]))
            return _copy(inputs[other], parts[rank, other]), [(gathered, collect)]

        fetched, views = (size - 1) * count * dtype.itemsize, [self._in_parts(array_of)] * 2
        return self._call(fingerprint, dtype, count, self._with_buffer(bind, dtype, size), views, fetched, size)

    def reduce_scatter(self, fingerprint: int, dtype: torch.dtype, count: int, operation: str) -> SlotCall:
        """Prepare a reduce-scatter of equal parts; call it with (out, inputs)."""
        rank, size = self.rank, self.size
        combine, arrays, view = _combining(operation, dtype)

        def bind(buffer: Rows, out: Data, inputs: Data) -> tuple[Step, Sequence[Exchanged]]:
            parts, gathered = buffer.parts, buffer.gathered
            addends = list(parts[:, rank])
            if size > 2:
                return _copy(inputs, parts[rank]), [(gathered, combine(addends, out))]
            addends[rank] = inputs[rank]  # with two ranks read the local part from the tensor
            return _copy(inputs[1 - rank], parts[rank, 1 - rank]), [(gathered, combine(addends, out))]

        of_length, fetched = self._with_buffer(bind, dtype, size, arrays), (size - 1) * count * dtype.itemsize
        return self._call(fingerprint, dtype, count, of_length, [view, self._in_parts(view)], fetched, size)

    def _with_buffer(
        self, bind: Callable[..., tuple[Step, Sequence[Exchanged]]], dtype: torch.dtype, parts: int = 1,
        arrays: bool = True,
    ) -> Callable[[int], Bind]:  # fmt: skip
        """Return a function of a segment's length that converts `bind`, which gets a buffer of it, to a `Bind`."""

        def of_length(length: int) -> Bind:
            buffers = self.slots.row_buffers(dtype, parts * length, arrays)
            return lambda number, *data: bind(buffers[number], *data)

        return of_length

    def _in_parts(self, view: View) -> View:
        return lambda tensor: view(tensor).reshape(self.size, -1)

    def _call(
        self, fingerprint: int, dtype: torch.dtype, count: int, of_length: Callable[[int], Bind], views: Sequence[View],
        fetched: int, parts: int = 1,
    ) -> SlotCall:  # fmt: skip
        """Create the call on `parts` parts of `count` elements, in segments: a segment of each part fits one row."""
        longest = self.slots.n_bytes // dtype.itemsize // parts
        cuts = list(slices(count, longest))
        binds = {length: of_length(length) for length in {cut.stop - cut.start for cut in cuts}}
        segments = [(cut, binds[cut.stop - cut.start]) for cut in cuts]
        return SlotCall(self.slots, self.comm, fingerprint, views, segments, fetched if self.slots.counted else 0)


class CallsByLibrary:
    """Prepares calls by the MPI library's functions: across nodes, and for long copies inside one node.

    Before each call the ranks compare its fingerprint, so that a mismatch is refused before anything is overwritten.
    MPI does not specify the order of additions, and lacks some operations and dtypes: so only sums and means use the
    fastest all-reduce. Other reductions exchange the ranks' tensors, and combine them in rank order.

    The methods have the arguments of those of `PreparedCalls`. They return None if point-to-point messages are faster.

    Args:
        agree: returns whether all ranks have a fingerprint.
        fastest: maps "sum" or "mean" to the fastest all-reduce.
    """

    def __init__(
        self, comm: Communicator, agree: Callable[[int], bool], fastest: Callable[[str], Callable[[Tensor], None]]
    ):
        self.comm: Any = comm  # an MpiCommunicator
        self.size = comm.size
        self._agree, self._fastest, self._inbox = agree, fastest, Scratch()

    def all_reduce(self, fingerprint: int, dtype: torch.dtype, count: int, operation: str) -> PreparedCall | None:
        if operation in ("sum", "mean") and dtype in SUMMED:
            return self._agreed(fingerprint, lambda local: self._fastest(operation)(local))
        return None

    def broadcast(self, fingerprint: int, dtype: torch.dtype, count: int, root: int) -> PreparedCall:
        return self._agreed(fingerprint, lambda local: self.comm.broadcast(local, root))

    def all_gather(self, fingerprint: int, dtype: torch.dtype, count: int) -> PreparedCall:
        def make(out: Tensor, local: Tensor) -> None:
            overlaps = out.data_ptr() <= local.data_ptr() < out.data_ptr() + out.nbytes
            self.comm.all_gather(out, local.clone() if overlaps else local)  # MPI forbids overlapping buffers

        return self._agreed(fingerprint, make)

    def all_to_all(self, fingerprint: int, dtype: torch.dtype, count: int) -> PreparedCall:
        def make(out: Tensor, inputs: Tensor) -> None:
            self.comm.all_to_all(out, inputs.clone() if out.data_ptr() == inputs.data_ptr() else inputs)

        return self._agreed(fingerprint, make)

    def reduce_scatter(self, fingerprint: int, dtype: torch.dtype, count: int, operation: str) -> PreparedCall | None:
        if self.size * count * dtype.itemsize > MESSAGE_BYTES:  # messages are then combined while others are in flight
            return None
        combine = reduction(operation, dtype)

        def make(out: Tensor, inputs: Tensor) -> None:
            received = self._inbox.empty_like(inputs, len(inputs))
            self.comm.all_to_all(received, inputs)
            combine(list(received.view(self.size, -1)), out)

        return self._agreed(fingerprint, make)

    def _agreed(self, fingerprint: int, make: Callable[..., None]) -> PreparedCall:
        """Return the call `make`, on flat tensors, run if all ranks have the same fingerprint."""

        def call(*tensors: Tensor) -> bool:
            agreed = self._agree(fingerprint)
            if agreed:
                make(*(tensor.detach().view(-1) for tensor in tensors))
            return agreed

        return call


def _combining(operation: str, dtype: torch.dtype) -> tuple[Combine, bool, View]:
    """Return the `Combine` of an operation, whether it works on arrays, and the function that views a tensor's data."""
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
    """View a dense tensor's elements, flat, in a tensor that does not keep their memory alive."""
    return torch.frombuffer((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()), dtype=tensor.dtype)
