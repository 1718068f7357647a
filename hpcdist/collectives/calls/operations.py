"""All collective calls of a communicator: every operation and dtype, blocking or asynchronous."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from hpcdist.collectives import load
from hpcdist.collectives.base import AllReduce, chunks
from hpcdist.collectives.calls.across_nodes import PACKET_BYTES, slots_across_nodes
from hpcdist.collectives.calls.exchange import (
    NONE,
    SLOT_BYTES,
    Consume,
    Copies,
    Exchange,
    MessageExchange,
    SlotExchange,
    fingerprint_of,
    refuse,
    shape_numbers,
)
from hpcdist.collectives.calls.prepared import (
    SUMMED,
    CallsByLibrary,
    PreparedCall,
    PreparedCalls,
    SlotCall,
    fastest_of,
    remember,
)
from hpcdist.collectives.calls.reduction import OPERATIONS, Reduce, reduction
from hpcdist.collectives.calls.tensors import (
    Tensors,
    by_dtype,
    each,
    flattened,
    for_each_rank,
    is_dense,
    require_fit,
    type_of,
)
from hpcdist.collectives.tuning.timing import Trial
from hpcdist.comm.communicator import Communicator, Traffic
from hpcdist.comm.transfer import Closed, check_rank
from hpcdist.comm.work import CallQueue, Work
from hpcdist.errors import ConfigError

WHOLE_BYTES = 1 << 22  # of all ranks: up to this size each rank reduces the whole tensors; of longer ones a slice
COPIES, TRIED_BYTES = {"broadcast", "all_gather", "all_to_all"}, 1 << 22  # of all ranks: MPI's may be faster
TRIALS = 3  # timings of each variant, after the first
LONG_BYTES = 1 << 20  # per rank: sums of longer tensors use the fastest all-reduce


class Collectives:
    """The collective calls of a communicator's ranks. Constructing, calling and closing it are collective.

    Tensors may have any shape, strides and device. If ranks differ in the call, shape, dtype, operation or root, all
    ranks raise MismatchError before anything is overwritten. Results are bitwise the same on all ranks and in all runs.
    With `async_op=True` a call returns a `Work` immediately (complete already on virtual ranks). Calls run in order.

    Args:
        comm: the ranks. A copy of it is used, so other messages on `comm` do not interfere.
        traffic: counts the transfers; by default the traffic of `comm`.

    Attributes:
        queue: runs the calls in order, and other functions that use `Collectives.comm`, the copy.

    Raises, all calls:
        ConfigError: the dtype lacks the operation, or the tensors of a call do not match in number, shape or dtype.
        MismatchError: the ranks' calls differ; raised on all ranks.

    Example:
        >>> from hpcdist.collectives.calls import Collectives
        >>> calls, gathered = Collectives(comm), torch.empty(2)
        >>> calls.all_gather(gathered, torch.tensor([float(comm.rank)]))
        >>> gathered
        tensor([0., 1.])
    """

    def __init__(self, comm: Communicator, traffic: Traffic | None = None):
        self.comm = comm.split(0, traffic=traffic or comm.trace.traffic)
        self.rank, self.size = comm.rank, comm.size
        self._exchange: Exchange  # created by the first call that needs it
        self._is_set_up = False
        self._providers: list[PreparedCalls | CallsByLibrary] = []  # of prepared calls: first by slots, last by MPI
        self._one_node = len(set(self.comm.nodes)) == 1
        self._trials: dict[tuple[str, int], Trial] = {}  # of calls with several providers, by call and length
        # Prepared calls; a second function is called with the tensors if the ranks' calls differ.
        self._by_fingerprint: dict[int, PreparedCall | None] = {}  # by fingerprint
        self._by_shape: dict[tuple[Any, ...], tuple[PreparedCall, Callable[..., None]]] = {}
        self._by_address: dict[tuple[Any, ...], tuple[Callable[[], bool], Callable[..., None]]] = {}
        self.queue = self.comm.queue()
        self._counted = self.comm.failures.collective
        self._everyone = range(self.size)
        self._algorithms: dict[str, AllReduce] = {}  # created on demand: `auto` may have to measure

    # --- reductions ---------------------------------------------------------------------------------------------------
    def all_reduce(
        self, tensor: Tensors, op: str = "sum", *, algorithm: str | None = None, factor: float | None = None,
        async_op: bool = False,
    ) -> Work | None:  # fmt: skip
        """Reduce a tensor, or each of several, over all ranks in place.

        Args:
            op: sum, mean, product, min, max, and, or, xor.
            algorithm: name of an all-reduce algorithm for the sum or mean of flat, contiguous tensors, one by one; the
                ranks' calls are then not compared. None: compare them, and use the fastest algorithm.
            factor: multiply this rank's tensor by it first.
        """
        if algorithm is not None:
            if op not in ("sum", "mean") or factor is not None:
                raise ConfigError(
                    f"op must be sum or mean, without factor, for algorithm {algorithm!r}; got {op!r}, factor "
                    f"{factor}. Remove algorithm."
                )
            reduce = self._algorithms.get(algorithm) or self.algorithm(algorithm)
            function = reduce.mean if op == "mean" else reduce
            return self.queue.run(lambda: [function(flat) for flat in each(tensor)], tensor, async_op=async_op)
        key = () if factor is not None else ("all_reduce", op, tensor)
        return self._start(async_op, tensor, lambda: self._all_reduce(tensor, op, factor), *key)

    def _all_reduce(self, tensors: Tensors, op: str, factor: float | None) -> None:
        """Reduce the tensors of each dtype jointly. Each branch first compares fingerprints: calls may differ."""
        with by_dtype(self.comm, tensors) as groups:
            for group, flat in groups:
                combine = reduction(op, flat.dtype)
                local = flat if factor is None else flat * factor
                fingerprint = fingerprint_of("all_reduce", flat.dtype, OPERATIONS.index(op), *shape_numbers(group))
                long = self.size * local.nbytes > WHOLE_BYTES and local.nbytes > LONG_BYTES
                if long and op in ("sum", "mean") and local.dtype in SUMMED:
                    agreed = self._exchange.agree(fingerprint)
                    if agreed:
                        self._fastest(op)(local)
                elif call := self._prepare("all_reduce", fingerprint, local.dtype, len(local), op):
                    agreed = call(local)
                    self._keep("all_reduce", op, call, group)
                elif self.size * local.nbytes <= WHOLE_BYTES:  # reduce whole tensors on every rank
                    counts, consume = [len(local)] * self.size, _into(local, combine)
                    agreed = self._exchange.move(fingerprint, local, counts, len(local), consume)
                else:
                    agreed = self._share_in_slices(fingerprint, local, combine)
                if not agreed:
                    refuse(self.comm, "all_reduce", op, *group)
                if local is not flat:
                    flat.copy_(local)

    def _fastest(self, op: str) -> Callable[[Tensor], None]:
        """Collective. Return the fastest all-reduce, for a sum or a mean."""
        # If a rank may die, only `native` is safe: others have separate communicators, which no one would revoke.
        reduce = self.algorithm("native" if self.comm.failures.tolerant else "auto")
        return reduce if op == "sum" else reduce.mean

    def _share_in_slices(self, fingerprint: int, local: Tensor, combine: Reduce) -> bool:
        """Reduce one slice on each rank, then share the slices; return whether the ranks' calls agree."""
        parts = chunks(local, self.size)
        counts, total = [len(part) for part in parts], torch.empty_like(parts[self.rank])
        received, consume = [len(total)] * self.size, _into(total, combine)
        if not self._exchange.move(fingerprint, parts, received, max(counts), consume):
            return False
        return self._exchange.move(fingerprint, total, counts, max(counts), Copies(parts))

    def reduce(
        self, tensor: Tensor, root: int, op: str = "sum", *, factor: float | None = None, async_op: bool = False
    ) -> Work | None:
        """Replace root's tensor by the reduction over all ranks; others don't change theirs. See `all_reduce`."""
        return self._start(async_op, tensor, lambda: self._reduce(tensor, root, op, factor))

    def _reduce(self, tensor: Tensor, root: int, op: str, factor: float | None) -> None:
        check_rank(root, self.size, "root")
        combine = reduction(op, tensor.dtype)
        with flattened(self.comm, tensor, write=self.rank == root) as flat:
            local = flat if factor is None else flat * factor
            fingerprint = fingerprint_of("reduce", tensor.dtype, OPERATIONS.index(op), root, *tensor.shape)
            counts = [len(flat)] * self.size
            consume = _into(flat, combine)
            agreed = self._exchange.move(fingerprint, local, counts, len(flat), consume, None, [root])
        if not agreed:
            refuse(self.comm, "reduce", f"{op}, root {root}", tensor)

    def reduce_scatter(
        self, out: Tensor, inputs: Tensors, op: str = "sum", *, factor: float | None = None, async_op: bool = False
    ) -> Work | None:
        """Reduce over all ranks the parts meant for this rank.

        Args:
            out: overwritten by the reduction.
            inputs: a list with a tensor for each rank, of the same shapes on all ranks; or one tensor of equal parts.
        """
        key = () if factor is not None else ("reduce_scatter", op, out, inputs)
        return self._start(async_op, out, lambda: self._reduce_scatter(out, inputs, op, factor), *key)

    def _reduce_scatter(self, out: Tensor, inputs: Tensors, op: str, factor: float | None) -> None:
        combine = reduction(op, out.dtype)
        with (
            for_each_rank(self.comm, inputs, "inputs", write=False, joint=True) as (parts, whole),
            flattened(self.comm, out) as flat,
        ):
            counts = [len(part) for part in parts]
            require_fit("out", out, parts[self.rank])
            fingerprint = fingerprint_of("reduce_scatter", out.dtype, OPERATIONS.index(op), *counts)
            call = self._prepare("reduce_scatter", fingerprint, out.dtype, len(flat), op)
            if call and whole is not None:
                agreed = call(flat, whole if factor is None else whole * factor)
                self._keep("reduce_scatter", op, call, [out, inputs])
            else:
                local = parts if factor is None else [part * factor for part in parts]
                received, longest = [len(flat)] * self.size, max(counts)
                agreed = self._exchange.move(fingerprint, local, received, longest, _into(flat, combine))
        if not agreed:
            refuse(self.comm, "reduce_scatter", op, *each(inputs))

    # --- copies -------------------------------------------------------------------------------------------------------
    def broadcast(self, tensor: Tensors, root: int = 0, *, async_op: bool = False) -> Work | None:
        """Copy root's tensor, or each of several, to all ranks."""
        return self._start(async_op, tensor, lambda: self._broadcast(tensor, root), "broadcast", root, tensor)

    def _broadcast(self, tensors: Tensors, root: int) -> None:
        check_rank(root, self.size, "root")
        others = [rank for rank in self._everyone if rank != root]
        with by_dtype(self.comm, tensors, write=self.rank != root) as groups:
            for group, flat in groups:
                fingerprint = fingerprint_of("broadcast", flat.dtype, root, *shape_numbers(group))
                counts = [len(flat)] * self.size
                if call := self._prepare("broadcast", fingerprint, flat.dtype, len(flat), root):
                    agreed = call(flat)
                    self._keep("broadcast", root, call, group)
                else:
                    copies = Copies({root: flat})
                    agreed = self._exchange.move(fingerprint, flat, counts, len(flat), copies, [root], others)
                if not agreed:
                    refuse(self.comm, "broadcast", root, *group)

    def all_gather(self, out: Tensors, tensor: Tensor, *, async_op: bool = False) -> Work | None:
        """Gather all ranks' tensors on all ranks.

        `out`: a list with a tensor for each rank, of the same shapes on all ranks; or one tensor of equal parts.
        """
        return self._start(async_op, out, lambda: self._all_gather(out, tensor), "all_gather", "", out, tensor)

    def _all_gather(self, out: Tensors, tensor: Tensor) -> None:
        with (
            for_each_rank(self.comm, out, "out", joint=True) as (parts, whole),
            flattened(self.comm, tensor, write=False) as local,
        ):
            counts = [len(part) for part in parts]
            require_fit("tensor", tensor, parts[self.rank])
            fingerprint = fingerprint_of("all_gather", tensor.dtype, *counts)
            call = self._prepare("all_gather", fingerprint, tensor.dtype, len(local))
            if call and whole is not None:
                agreed = call(whole, local)
                self._keep("all_gather", "", call, [out, tensor])
            else:
                agreed = self._exchange.move(fingerprint, local, counts, max(counts), Copies(parts))
        if not agreed:
            refuse(self.comm, "all_gather", "", *each(out), tensor)

    def gather(
        self, out: Sequence[Tensor] | None, tensor: Tensor, root: int = 0, *, async_op: bool = False
    ) -> Work | None:
        """Gather all ranks' tensors on root, in `out`: a list with a tensor for each rank; None on other ranks."""
        return self._start(async_op, out, lambda: self._gather(out, tensor, root))

    def _gather(self, out: Sequence[Tensor] | None, tensor: Tensor, root: int) -> None:
        check_rank(root, self.size, "root")
        with for_each_rank(self.comm, out, "out", here=self.rank == root) as (parts, _):
            sent = [tensor.numel() if rank == root else NONE for rank in self._everyone]
            expected = [len(part) for part in parts]
            counts = self._exchange.lengths("gather", tensor.dtype, root, sent, expected)
            of_root = [row[root] for row in counts]
            with flattened(self.comm, tensor, write=False) as local:
                self._exchange.move(0, local, of_root, max(of_root), Copies(parts), None, [root])

    def scatter(
        self, out: Tensor, inputs: Sequence[Tensor] | None = None, root: int = 0, *, async_op: bool = False
    ) -> Work | None:
        """Send each rank, into its `out`, one of root's `inputs`: a tensor for each rank; None on other ranks."""
        return self._start(async_op, out, lambda: self._scatter(out, inputs, root))

    def _scatter(self, out: Tensor, inputs: Sequence[Tensor] | None, root: int) -> None:
        check_rank(root, self.size, "root")
        with for_each_rank(self.comm, inputs, "inputs", write=False, here=self.rank == root) as (parts, _):
            sent = [len(part) for part in parts]
            expected = [out.numel() if rank == root else NONE for rank in self._everyone]
            lengths = self._exchange.lengths("scatter", out.dtype, root, sent, expected)[root]
            with flattened(self.comm, out) as flat:
                # On ranks other than root `local` only has the dtype.
                local, counts = parts or [flat] * self.size, [lengths[self.rank]] * self.size
                self._exchange.move(0, local, counts, max(lengths), Copies({root: flat}), [root])

    def all_to_all(self, out: Tensors, inputs: Tensors, *, async_op: bool = False) -> Work | None:
        """Send each rank its part of `inputs`, and gather in `out` the parts of all ranks for this one.

        Each is a list with a tensor for each rank, of any lengths; or one tensor of equal parts.
        """
        return self._start(async_op, out, lambda: self._all_to_all(out, inputs), "all_to_all", "", out, inputs)

    def _all_to_all(self, out: Tensors, inputs: Tensors) -> None:
        """Exchange the parts if all ranks' parts have equal lengths; otherwise exchange the lengths first."""
        with (
            for_each_rank(self.comm, out, "out", joint=True) as (outs, whole),
            for_each_rank(self.comm, inputs, "inputs", write=False, joint=True) as (local, whole_input),
        ):
            dtype, lengths, longest = outs[0].dtype, {len(part) for part in (*local, *outs)}, len(local[0])
            if local[0].dtype != dtype:
                raise ConfigError(
                    f"inputs must have the dtype of out, {type_of(dtype)}; got {type_of(local[0].dtype)}. Convert them."
                )
            fingerprint = fingerprint_of("all_to_all", dtype, longest)
            call = self._prepare("all_to_all", fingerprint, dtype, longest)
            if len(lengths) > 1:
                self._exchange.agree(0)  # ranks with equal parts see another fingerprint, and exchange lengths, too
                equal = False
            elif call and whole is not None and whole_input is not None:
                equal = call(whole, whole_input)
                self._keep("all_to_all", "", call, [out, inputs], self._all_to_all_uneven)
            else:
                sizes = [longest] * self.size
                equal = self._exchange.move(fingerprint, local, sizes, longest, Copies(outs))
        if not equal:
            self._all_to_all_uneven(out, inputs)

    def _all_to_all_uneven(self, out: Tensors, inputs: Tensors) -> None:
        with (
            for_each_rank(self.comm, out, "out") as (outs, _),
            for_each_rank(self.comm, inputs, "inputs", write=False) as (local, _),
        ):
            expected, dtype = [len(part) for part in outs], outs[0].dtype
            sent = [len(part) for part in local]
            counts = self._exchange.lengths("all_to_all", dtype, 0, sent, expected)
            self._exchange.move(0, local, expected, max(map(max, counts)), Copies(outs))

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Wait until all ranks have called it."""
        return self._start(async_op, None, self._barrier)

    def _barrier(self) -> None:
        if not self._exchange.agree(fingerprint_of("barrier", torch.uint8)):
            refuse(self.comm, "barrier", "")

    def close(self) -> None:
        """Wait for all calls, and release memory, thread and communicator."""
        self.queue.close()
        self.queue = cast(CallQueue, Closed())  # every call uses it first
        for known in (self._by_fingerprint, self._by_shape, self._by_address):
            known.clear()
        for algorithm in self._algorithms.values():
            algorithm.close()
        if self._is_set_up:
            self._exchange.close()
        self.comm.close()

    # --- common parts of the calls ------------------------------------------------------------------------------------
    def algorithm(self, name: str) -> AllReduce:
        """Collective at the first call. Return an all-reduce algorithm by name; raise UnknownNameError if unknown."""
        if name not in self._algorithms:
            self._algorithms[name] = load(name)(self.comm)
        return self._algorithms[name]

    def _start(self, async_op: bool, out: Any, call: Callable[[], None], *key: Any) -> Work | None:
        """Run `call` after earlier ones; with `key`, the arguments of `_run_prepared`, try a prepared call first."""

        def make() -> None:
            if not key or not self._run_prepared(*key):
                if not self._is_set_up:
                    self._set_up()
                with self._counted:
                    call()

        if not async_op:
            return self.queue.run(make)
        if self.comm.platform.virtual is None:
            return self.queue.submit(make, out)
        work = Work(out)
        work.run(partial(self.queue.run, make))
        return work

    def _set_up(self) -> None:
        """Collective. Choose how these ranks exchange data."""
        inside = self.comm.memory.slots(SLOT_BYTES)
        slots = inside or slots_across_nodes(self.comm)
        self._exchange = SlotExchange(self.comm, inside) if inside else MessageExchange(self.comm, slots)
        if slots:
            self._providers.append(PreparedCalls(slots, self.comm))
        if self.comm.mpi is not None and not self.comm.failures.tolerant:
            self._providers.append(CallsByLibrary(self.comm, self._exchange.agree, self._fastest))
        self._is_set_up = True

    def _run_prepared(self, call: str, detail: str | int, *tensors: Any) -> bool:
        """Run the call that was prepared for these shapes, if any; return whether there was one."""
        try:
            address: tuple[Any, ...] = (call, detail)
            for tensor in tensors:
                address += (tensor.data_ptr(), tensor.dtype, tensor.shape)
                if not is_dense(tensor):
                    return False
        except AttributeError:  # of lists
            return False
        bound_call = self._by_address.get(address)
        if bound_call is not None:
            make, otherwise = bound_call
            with self._counted:
                agreed = make()
        else:
            of_shape = self._by_shape.get(_shape_of(call, detail, tensors))
            if of_shape is None or not all(tensor.is_cpu for tensor in tensors):
                return False
            prepared, otherwise = of_shape
            bound = prepared.bound(*tensors) if isinstance(prepared, SlotCall) else None
            if bound is not None:
                remember(self._by_address, address, (bound, otherwise))
            with self._counted:
                agreed = prepared(*tensors)
        if not agreed:
            otherwise(*tensors)
        return True

    def _prepare(
        self, call: str, fingerprint: int, dtype: torch.dtype, count: int, *details: str | int
    ) -> PreparedCall | None:
        """Return a prepared call if one is faster than an exchange; None otherwise, and for empty tensors."""
        if not self._providers or not count:
            return None
        if fingerprint not in self._by_fingerprint:
            n_bytes = count * dtype.itemsize
            providers = self._choose(call, n_bytes)
            calls = [getattr(provider, call)(fingerprint, dtype, count, *details) for provider in providers]
            if len(calls) > 1:
                trial = self._trials.setdefault((call, n_bytes.bit_length()), Trial(self.comm, len(calls), TRIALS))
                calls = [fastest_of(calls, trial)]
            remember(self._by_fingerprint, fingerprint, calls[0])
        return self._by_fingerprint[fingerprint]

    def _choose(self, call: str, n_bytes: int) -> Sequence[PreparedCalls | CallsByLibrary]:
        """Return the providers that may be the fastest for tensors, or parts, of `n_bytes`."""
        if self._one_node:
            return self._providers if call in COPIES and self.size * n_bytes >= TRIED_BYTES else self._providers[:1]
        if call in ("all_to_all", "reduce_scatter"):
            short = (self.size - 1) * self.size * n_bytes <= PACKET_BYTES // 4  # slots send every part to all nodes
        else:
            short = (1 if call == "broadcast" else self.size - 1) * n_bytes <= PACKET_BYTES
        if short:
            return self._providers[:1]
        share_nodes = len(set(self.comm.nodes)) < self.size
        return self._providers if call == "broadcast" and share_nodes else self._providers[-1:]

    def _keep(
        self, call: str, detail: str | int, prepared: PreparedCall, tensors: Sequence[Any],
        otherwise: Callable[..., None] | None = None,
    ) -> None:  # fmt: skip
        """Keep a prepared call for `_run_prepared`; `otherwise` gets the tensors if the ranks' calls differ."""
        n_tensors = 1 + (call not in ("all_reduce", "broadcast"))
        if len(tensors) == n_tensors and all(isinstance(tensor, Tensor) for tensor in tensors):
            value = prepared, otherwise or partial(refuse, self.comm, call, detail)
            remember(self._by_shape, _shape_of(call, detail, tensors), value)


def _shape_of(call: str, detail: str | int, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return (call, detail, *((tensor.dtype, tensor.shape) for tensor in tensors))


def _into(out: Tensor, combine: Reduce) -> Consume:
    """Return a `Consume` (see `Exchange.move`) that combines the ranks' segments into the same segment of `out`."""

    def consume(start: int, received: Sequence[Tensor]) -> None:
        into = out[start : start + len(received[0])]  # may be shorter than the longest rank's
        combine([part[: len(into)] for part in received], into)

    return consume
