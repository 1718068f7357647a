"""All collective calls of a communicator: every operation and dtype, blocking or as a work to be waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from hpcdist.collectives import load
from hpcdist.collectives.base import AllReduce, chunks
from hpcdist.collectives.calls.across_nodes import PACKET_BYTES, slots_across_nodes
from hpcdist.collectives.calls.agreement import NONE, fingerprint_of, refuse, shape_numbers, tell_lengths
from hpcdist.collectives.calls.by_library import SUMMED, CallsByLibrary
from hpcdist.collectives.calls.exchange import SLOT_BYTES, Copies, Exchange, MessageExchange, SlotExchange, Take
from hpcdist.collectives.calls.prepared import PreparedCall, PreparedCalls, TriedCall, remember
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

WHOLE_BYTES = 1 << 22  # of all ranks: up to here a rank adds up their whole tensors, and a slice of longer ones
COPIES, TRIED_BYTES = {"broadcast", "all_gather", "all_to_all"}, 1 << 22  # of all ranks: MPI's own may be faster
TRIALS = 3  # of each of the ways, after the first
LONG_BYTES = 1 << 20  # of longer ones again: sums take the fastest all-reduce


class Collectives:
    """Collective, as are its calls and `close`. The collective calls of the ranks of a communicator.

    Tensors may have any shape, strides and device. What differs between ranks and must not (call, shape, dtype,
    operation, root) is refused on all of them, before anything is overwritten. Results are bitwise the same on all
    ranks, and whenever the same ranks make the same call. With `async_op` a call returns a `Work` at once, on virtual
    ranks one that is over. Calls are made in their order, also those that block.

    Args:
        comm: the ranks. Their collectives have messages of their own.
        traffic: the account in which they count; by default that of `comm`.

    Attributes:
        comm: the copy of `comm` that has these messages.
        queue: makes the calls, and functions that use `comm` alone, in their order.

    Raises, all calls:
        ConfigError: the operation says nothing of this dtype, a list has not one tensor for each rank, or tensors do
            not fit each other.
        MismatchError: ranks differ; on all ranks alike.
    """

    def __init__(self, comm: Communicator, traffic: Traffic | None = None):
        self.comm = comm.split(0, traffic=traffic or comm.trace.traffic)
        self.rank, self.size = comm.rank, comm.size
        self._exchange: Exchange  # made with the first call that needs it
        self._is_set_up = False
        self._ways: list[PreparedCalls | CallsByLibrary] = []
        self._one_node = len(set(self.comm.nodes)) == 1
        self._trials: dict[tuple[str, int], Trial] = {}  # of calls that several ways make, by their length
        self._ready: dict[int, PreparedCall | None] = {}  # by notes
        self._by_shape: dict[tuple[Any, ...], tuple[PreparedCall, Callable[..., None]]] = {}
        self._by_place: dict[tuple[Any, ...], tuple[Callable[[], bool], Callable[..., None]]] = {}
        self.queue = self.comm.queue()
        self._counted = self.comm.failures.collective
        self._everyone = range(self.size)
        self._algorithms: dict[str, AllReduce] = {}  # made when they are needed: `auto` may have to measure

    # --- reductions ---------------------------------------------------------------------------------------------------
    def all_reduce(
        self, tensor: Tensors, op: str = "sum", *, algorithm: str | None = None, factor: float | None = None,
        async_op: bool = False,
    ) -> Work | None:  # fmt: skip
        """Replace a tensor, or each of several, by the combination of all ranks' tensors.

        Args:
            op: sum, mean, product, min, max, and, or, xor.
            algorithm: takes the sum or mean of flat, contiguous tensors one by one. The ranks must have made sure that
                they make the same call. None: they compare it, and the fastest algorithm is taken.
            factor: by which this rank's tensor is multiplied before.
        """
        if algorithm is not None:
            if op not in ("sum", "mean") or factor is not None:
                raise ConfigError(
                    f"op must be sum or mean, without factor, where algorithm is {algorithm!r}; got {op!r}, factor "
                    f"{factor}. Leave out algorithm."
                )
            reduce = self._algorithms.get(algorithm) or self.algorithm(algorithm)
            function = reduce.mean if op == "mean" else reduce
            return self.queue.run(lambda: [function(flat) for flat in each(tensor)], tensor, async_op=async_op)
        like = () if factor is not None else ("all_reduce", op, tensor)
        return self._start(async_op, tensor, lambda: self._all_reduce(tensor, op, factor), *like)

    def _all_reduce(self, tensors: Tensors, op: str, factor: float | None) -> None:
        with by_dtype(self.comm, tensors) as joined:
            for like, flat in joined:
                combine = reduction(op, flat.dtype)
                own = flat if factor is None else flat * factor
                fingerprint = fingerprint_of("all_reduce", flat.dtype, OPERATIONS.index(op), *shape_numbers(like))
                long = self.size * own.nbytes > WHOLE_BYTES and own.nbytes > LONG_BYTES
                if long and op in ("sum", "mean") and own.dtype in SUMMED:
                    taken = self._sum(fingerprint, own, op)
                elif call := self._prepare("all_reduce", fingerprint, own.dtype, len(own), op):
                    taken = call(own)
                    self._keep("all_reduce", op, call, like)
                elif self.size * own.nbytes <= WHOLE_BYTES:
                    taken = self._share(fingerprint, own, combine)
                else:
                    taken = self._share_in_slices(fingerprint, own, combine)
                if not taken:
                    refuse(self.comm, "all_reduce", op, *like)
                if own is not flat:
                    flat.copy_(own)

    def _sum(self, fingerprint: int, own: Tensor, op: str) -> bool:
        """Take the algorithm that is the fastest for long tensors on these ranks."""
        if not self._exchange.agree(fingerprint):
            return False
        self._fastest(op)(own)
        return True

    def _fastest(self, op: str) -> Callable[[Tensor], None]:
        """Collective. Return the fastest all-reduce, for a sum or a mean."""
        # Where a rank may die, others have communicators of their own, which nobody would abandon.
        reduce = self.algorithm("native" if self.comm.failures.tolerant else "auto")
        return reduce if op == "sum" else reduce.mean

    def _share(self, fingerprint: int, own: Tensor, combine: Reduce) -> bool:
        """Combine all of the tensors on every rank."""
        counts = [len(own)] * self.size
        return self._exchange.share(fingerprint, own, counts, _into(own, combine), self._everyone, self._everyone)

    def _share_in_slices(self, fingerprint: int, own: Tensor, combine: Reduce) -> bool:
        """Combine a slice on each rank, and share the slices."""
        parts = chunks(own, self.size)
        counts, total = [len(part) for part in parts], torch.empty_like(parts[self.rank])
        brought, take = [len(total)] * self.size, _into(total, combine)
        if not self._exchange.deal(fingerprint, parts, brought, max(counts), take, self._everyone):
            return False
        return self._exchange.share(fingerprint, total, counts, Copies(parts), self._everyone, self._everyone)

    def reduce(
        self, tensor: Tensor, root: int, op: str = "sum", *, factor: float | None = None, async_op: bool = False
    ) -> Work | None:
        """Replace root's tensor by the combination of all ranks' tensors. Others keep theirs; see `all_reduce`."""
        return self._start(async_op, tensor, lambda: self._reduce(tensor, root, op, factor))

    def _reduce(self, tensor: Tensor, root: int, op: str, factor: float | None) -> None:
        check_rank(root, self.size, "root")
        combine = reduction(op, tensor.dtype)
        with flattened(self.comm, tensor, write=self.rank == root) as flat:
            own = flat if factor is None else flat * factor
            fingerprint = fingerprint_of("reduce", tensor.dtype, OPERATIONS.index(op), root, *tensor.shape)
            counts = [len(flat)] * self.size
            taken = self._exchange.share(fingerprint, own, counts, _into(flat, combine), self._everyone, [root])
        if not taken:
            refuse(self.comm, "reduce", f"{op}, root {root}", tensor)

    def reduce_scatter(
        self, out: Tensor, given: Tensors, op: str = "sum", *, factor: float | None = None, async_op: bool = False
    ) -> Work | None:
        """Combine, of all ranks' tensors, the part that is this rank's.

        Args:
            out: overwritten.
            given: a tensor for each rank, those for one rank alike on all; or one tensor, cut into equal parts.
        """
        like = () if factor is not None else ("reduce_scatter", op, out, given)
        return self._start(async_op, out, lambda: self._reduce_scatter(out, given, op, factor), *like)

    def _reduce_scatter(self, out: Tensor, given: Tensors, op: str, factor: float | None) -> None:
        combine = reduction(op, out.dtype)
        with (
            for_each_rank(self.comm, given, "given", write=False, joint=True) as (parts, whole),
            flattened(self.comm, out) as flat,
        ):
            counts = [len(part) for part in parts]
            require_fit("out", out, parts[self.rank])
            fingerprint = fingerprint_of("reduce_scatter", out.dtype, OPERATIONS.index(op), *counts)
            call = self._prepare("reduce_scatter", fingerprint, out.dtype, len(flat), op)
            if call and whole is not None:
                taken = call(flat, whole if factor is None else whole * factor)
                self._keep("reduce_scatter", op, call, [out, given])
            else:
                own = parts if factor is None else [part * factor for part in parts]
                brought, longest = [len(flat)] * self.size, max(counts)
                taken = self._exchange.deal(fingerprint, own, brought, longest, _into(flat, combine), self._everyone)
        if not taken:
            refuse(self.comm, "reduce_scatter", op, *each(given))

    # --- copies -------------------------------------------------------------------------------------------------------
    def broadcast(self, tensor: Tensors, root: int = 0, *, async_op: bool = False) -> Work | None:
        """Copy root's tensor, or each of several, into everyone's."""
        return self._start(async_op, tensor, lambda: self._broadcast(tensor, root), "broadcast", root, tensor)

    def _broadcast(self, tensors: Tensors, root: int) -> None:
        check_rank(root, self.size, "root")
        others = [rank for rank in self._everyone if rank != root]
        with by_dtype(self.comm, tensors, write=self.rank != root) as joined:
            for like, flat in joined:
                fingerprint, counts = (
                    fingerprint_of("broadcast", flat.dtype, root, *shape_numbers(like)),
                    [len(flat)] * self.size,
                )
                if call := self._prepare("broadcast", fingerprint, flat.dtype, len(flat), root):
                    taken = call(flat)
                    self._keep("broadcast", root, call, like)
                else:
                    taken = self._exchange.share(fingerprint, flat, counts, Copies({root: flat}), [root], others)
                if not taken:
                    refuse(self.comm, "broadcast", root, *like)

    def all_gather(self, out: Tensors, tensor: Tensor, *, async_op: bool = False) -> Work | None:
        """Collect all ranks' tensors.

        Args:
            out: a tensor for each rank, overwritten, alike on all ranks; or one tensor, of equal parts.
        """
        return self._start(async_op, out, lambda: self._all_gather(out, tensor), "all_gather", "", out, tensor)

    def _all_gather(self, out: Tensors, tensor: Tensor) -> None:
        with (
            for_each_rank(self.comm, out, "out", joint=True) as (parts, whole),
            flattened(self.comm, tensor, write=False) as own,
        ):
            counts = [len(part) for part in parts]
            require_fit("tensor", tensor, parts[self.rank])
            fingerprint = fingerprint_of("all_gather", tensor.dtype, *counts)
            call = self._prepare("all_gather", fingerprint, tensor.dtype, len(own))
            if call and whole is not None:
                taken = call(whole, own)
                self._keep("all_gather", "", call, [out, tensor])
            else:
                taken = self._exchange.share(fingerprint, own, counts, Copies(parts), self._everyone, self._everyone)
        if not taken:
            refuse(self.comm, "all_gather", "", *each(out), tensor)

    def gather(
        self, out: Sequence[Tensor] | None, tensor: Tensor, root: int = 0, *, async_op: bool = False
    ) -> Work | None:
        """Collect all ranks' tensors on root.

        Args:
            out: on root, a tensor for each rank, overwritten; None elsewhere.
        """
        return self._start(async_op, out, lambda: self._gather(out, tensor, root))

    def _gather(self, out: Sequence[Tensor] | None, tensor: Tensor, root: int) -> None:
        check_rank(root, self.size, "root")
        with for_each_rank(self.comm, out, "out", here=self.rank == root) as (parts, _):
            brought = [tensor.numel() if rank == root else NONE for rank in self._everyone]
            wanted = [len(part) for part in parts]
            counts = tell_lengths(self.comm, self._exchange, "gather", tensor.dtype, root, brought, wanted)
            of_root = [row[root] for row in counts]
            with flattened(self.comm, tensor, write=False) as own:
                self._exchange.share(0, own, of_root, Copies(parts), self._everyone, [root])

    def scatter(
        self, out: Tensor, given: Sequence[Tensor] | None = None, root: int = 0, *, async_op: bool = False
    ) -> Work | None:
        """Hand out root's tensors, one to each rank.

        Args:
            out: overwritten.
            given: on root, a tensor for each rank; None elsewhere.
        """
        return self._start(async_op, out, lambda: self._scatter(out, given, root))

    def _scatter(self, out: Tensor, given: Sequence[Tensor] | None, root: int) -> None:
        check_rank(root, self.size, "root")
        with for_each_rank(self.comm, given, "given", write=False, here=self.rank == root) as (parts, _):
            sent = [len(part) for part in parts]
            wanted = [out.numel() if rank == root else NONE for rank in self._everyone]
            handed = tell_lengths(self.comm, self._exchange, "scatter", out.dtype, root, sent, wanted)[root]
            with flattened(self.comm, out) as flat:
                own, mine = parts or [flat] * self.size, [handed[self.rank]] * self.size
                self._exchange.deal(0, own, mine, max(handed), Copies({root: flat}), [root])

    def all_to_all(self, out: Tensors, given: Tensors, *, async_op: bool = False) -> Work | None:
        """Hand each rank its part of `given`, and collect what all ranks have for this one.

        Args:
            out: a tensor for each rank, overwritten, of any lengths; or one tensor, of equal parts.
            given: the same.
        """
        return self._start(async_op, out, lambda: self._all_to_all(out, given), "all_to_all", "", out, given)

    def _all_to_all(self, out: Tensors, given: Tensors) -> None:
        """Exchange at once where all parts of all ranks are as long; else tell each other how long they are, first."""
        with (
            for_each_rank(self.comm, out, "out", joint=True) as (outs, whole),
            for_each_rank(self.comm, given, "given", write=False, joint=True) as (own, brought),
        ):
            dtype, lengths, longest = outs[0].dtype, {len(part) for part in (*own, *outs)}, len(own[0])
            if own[0].dtype != dtype:
                raise ConfigError(
                    f"given must be of out's dtype, {type_of(dtype)}; got {type_of(own[0].dtype)}. Make both alike."
                )
            fingerprint = fingerprint_of("all_to_all", dtype, longest)
            call = self._prepare("all_to_all", fingerprint, dtype, longest)
            if len(lengths) > 1:
                self._exchange.agree(0)
                equal = False
            elif call and whole is not None and brought is not None:
                equal = call(whole, brought)
                self._keep("all_to_all", "", call, [out, given], self._all_to_all_uneven)
            else:
                equal = self._exchange.deal(
                    fingerprint, own, [longest] * self.size, longest, Copies(outs), self._everyone
                )
        if not equal:
            self._all_to_all_uneven(out, given)

    def _all_to_all_uneven(self, out: Tensors, given: Tensors) -> None:
        with (
            for_each_rank(self.comm, out, "out") as (outs, _),
            for_each_rank(self.comm, given, "given", write=False) as (own, _),
        ):
            wanted, dtype = [len(part) for part in outs], outs[0].dtype
            counts = tell_lengths(
                self.comm, self._exchange, "all_to_all", dtype, 0, [len(part) for part in own], wanted
            )
            self._exchange.deal(0, own, wanted, max(map(max, counts)), Copies(outs), self._everyone)

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Return once all ranks have called it."""
        return self._start(async_op, None, self._barrier)

    def _barrier(self) -> None:
        if not self._exchange.agree(fingerprint_of("barrier", torch.uint8)):
            refuse(self.comm, "barrier", "")

    def close(self) -> None:
        """Wait for all calls, and release memory, thread and messages."""
        self.queue.close()
        self.queue = cast(CallQueue, Closed())  # that every call begins with
        for known in (self._ready, self._by_shape, self._by_place):
            known.clear()
        for algorithm in self._algorithms.values():
            algorithm.close()
        if self._is_set_up:
            self._exchange.close()
        self.comm.close()

    def shared_zeros(self, like: Sequence[Tensor]) -> list[Tensor] | None:
        """Make zeros like flat tensors, which ranks of one node sum where they lie; None where one is on a device."""
        memory = self.comm.memory
        return [memory.zeros(len(flat), flat.dtype) for flat in like] if all(flat.is_cpu for flat in like) else None

    # --- what calls have in common ------------------------------------------------------------------------------------
    def algorithm(self, name: str) -> AllReduce:
        """Collective at the first call. Return an all-reduce algorithm of these ranks; UnknownNameError: no such."""
        if name not in self._algorithms:
            self._algorithms[name] = load(name)(self.comm)
        return self._algorithms[name]

    def _start(self, async_op: bool, out: Any, call: Callable[[], None], *like: Any) -> Work | None:
        """Make a call when those before it are over.

        Args:
            like: of calls that may be prepared, what `_made` takes.
        """

        def make() -> None:
            if not like or not self._made(*like):
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
        """Collective. Find how these ranks hand data to each other."""
        inside = self.comm.memory.slots(SLOT_BYTES)
        slots = inside or slots_across_nodes(self.comm)
        self._exchange = SlotExchange(self.comm, inside) if inside else MessageExchange(self.comm, slots)
        if slots:
            self._ways.append(PreparedCalls(slots, self.comm))
        if self.comm.mpi is not None and not self.comm.failures.tolerant:
            self._ways.append(CallsByLibrary(self.comm, self._exchange.agree, self._fastest))
        self._is_set_up = True

    def _made(self, call: str, detail: str | int, *tensors: Any) -> bool:
        """Make a call as one like it was made before; tell whether there was one."""
        try:
            place: tuple[Any, ...] = (call, detail)
            for tensor in tensors:
                place += (tensor.data_ptr(), tensor.dtype, tensor.shape)
                if not is_dense(tensor):
                    return False
        except AttributeError:  # of lists
            return False
        found = self._by_place.get(place)
        if found is not None:
            make, otherwise = found
            with self._counted:
                alike = make()
        else:
            of_shape = self._by_shape.get(_shape_of(call, detail, tensors))
            if of_shape is None or not all(tensor.is_cpu for tensor in tensors):
                return False
            prepared, otherwise = of_shape
            bound = prepared.bound(*tensors)
            if bound is not None:
                remember(self._by_place, place, (bound, otherwise))
            with self._counted:
                alike = prepared(*tensors)
        if not alike:
            otherwise(*tensors)
        return True

    def _prepare(
        self, call: str, fingerprint: int, dtype: torch.dtype, count: int, *details: str | int
    ) -> PreparedCall | None:
        """Return what makes a call, where there is something faster than an exchange and the ranks bring anything."""
        if not self._ways or not count:
            return None
        if fingerprint not in self._ready:
            n_bytes = count * dtype.itemsize
            ways = [getattr(of, call)(fingerprint, dtype, count, *details) for of in self._choose(call, n_bytes)]
            if len(ways) > 1:
                trial = self._trials.setdefault((call, n_bytes.bit_length()), Trial(self.comm, len(ways), TRIALS))
                ways = [TriedCall(ways, trial)]
            remember(self._ready, fingerprint, ways[0])
        return self._ready[fingerprint]

    def _choose(self, call: str, n_bytes: int) -> Sequence[PreparedCalls | CallsByLibrary]:
        """Return the ways that may be the fastest for tensors, or parts, of a length."""
        if self._one_node:
            return self._ways if call in COPIES and self.size * n_bytes >= TRIED_BYTES else self._ways[:1]
        if call in ("all_to_all", "reduce_scatter"):
            short = (self.size - 1) * self.size * n_bytes <= PACKET_BYTES // 4  # all nodes get what is for one rank
        else:
            short = (1 if call == "broadcast" else self.size - 1) * n_bytes <= PACKET_BYTES
        if short:
            return self._ways[:1]
        share_nodes = len(set(self.comm.nodes)) < self.size
        return self._ways if call == "broadcast" and share_nodes else self._ways[-1:]

    def _keep(
        self, call: str, detail: str | int, prepared: PreparedCall, tensors: Sequence[Any],
        otherwise: Callable[..., None] | None = None,
    ) -> None:  # fmt: skip
        """Keep a call for others on tensors like these, unless they are lists; `otherwise`: where ranks differ."""
        wanted = 1 + (call not in ("all_reduce", "broadcast"))
        if len(tensors) == wanted and all(isinstance(one, Tensor) for one in tensors):
            kept = prepared, otherwise or partial(refuse, self.comm, call, detail)
            remember(self._by_shape, _shape_of(call, detail, tensors), kept)


def _shape_of(call: str, detail: str | int, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return (call, detail, *((tensor.dtype, tensor.shape) for tensor in tensors))


def _into(out: Tensor, combine: Reduce) -> Take:
    """Return what combines the ranks' segments into the same segment of `out`."""

    def take(start: int, found: Sequence[Tensor]) -> None:
        into = out[start : start + len(found[0])]  # which may end before the longest rank's
        combine([one[: len(into)] for one in found], into)

    return take
