"""All collective calls of a communicator: every operation and dtype, blocking or as a work to be waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpcdist.collectives.auto import Auto
from hpcdist.collectives.base import chunks
from hpcdist.collectives.calls.agreement import NONE, note_of, refuse, shape_numbers, tell_lengths
from hpcdist.collectives.calls.exchange import SLOT_BYTES, Copies, Exchange, MessageExchange, SlotExchange, Take
from hpcdist.collectives.calls.lanes import Lane, Lanes, is_dense, place, plain, remember
from hpcdist.collectives.calls.reduction import OPERATIONS, Reduce, reduction
from hpcdist.collectives.calls.tensors import Tensors, by_dtype, each, flattened, for_each_rank, require_fit
from hpcdist.collectives.calls.work import CallQueue, Work
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transfer import check_rank

WHOLE_BYTES = 1 << 22  # of all ranks: up to here a rank adds up their whole tensors, and a slice of longer ones
LONG_BYTES = 1 << 20  # of longer ones again: sums of the types below take the fastest all-reduce
LONG_TYPES = {torch.float32, torch.float64, torch.int32, torch.int64, torch.complex64, torch.complex128}


class Collectives:
    """Collective, as are its calls and `close`. The collective calls of the ranks of a communicator.

    Tensors may have any shape, strides and device. What differs between ranks and must not (call, shape, dtype,
    operation, root) is refused on all of them, before anything is overwritten. Results are bitwise the same on all
    ranks, and whenever the same ranks make the same call. With `wait=False` a call returns a `Work` at once. Calls are
    made in their order, also those that wait.

    Args:
        comm: the ranks. Their collectives have messages of their own, and count in its account of traffic.

    Raises, all calls:
        ConfigError: the operation says nothing of this dtype, a list has not one tensor for each rank, or tensors do
            not fit each other.
        MismatchError: ranks differ; on all ranks alike.
    """

    def __init__(self, comm: Communicator):
        self.comm = comm.split(0, traffic=comm.trace.traffic)
        self.rank, self.size = comm.rank, comm.size
        slots = self.comm.memory.slots(SLOT_BYTES)
        self._exchange: Exchange = MessageExchange(self.comm) if slots is None else SlotExchange(self.comm, slots)
        self._short = None if slots is None else Lanes(slots, self.comm)
        self._lanes: dict[tuple[Any, ...], tuple[Lane, Callable[..., None]]] = {}
        self._queue = CallQueue(self.comm)
        self._counted = self.comm.failures.collective
        self._everyone = range(self.size)
        self._auto: Auto | None = None  # made when it is needed, as it may have to measure

    # --- reductions ---------------------------------------------------------------------------------------------------
    def all_reduce(
        self, tensor: Tensors, operation: str = "sum", *, factor: float | None = None, wait: bool = True
    ) -> Work | None:
        """Replace a tensor, or each of several, by the combination of all ranks' tensors.

        Args:
            operation: sum, mean, product, min, max, and, or, xor.
            factor: by which this rank's tensor is multiplied before.
        """
        if wait and factor is None and self._made("all_reduce", operation, tensor):
            return None
        return self._begin(wait, lambda: self._all_reduce(tensor, operation, factor))

    def _all_reduce(self, tensors: Tensors, operation: str, factor: float | None) -> None:
        with by_dtype(self.comm, tensors) as joined:
            for like, flat in joined:
                combine = reduction(operation, flat.dtype)
                own = flat if factor is None else flat * factor
                note = note_of("all_reduce", flat.dtype, OPERATIONS.index(operation), *shape_numbers(like))
                whole = self.size * flat.nbytes <= WHOLE_BYTES
                if whole:
                    taken = self._share(note, own, flat, combine)
                elif flat.nbytes > LONG_BYTES and operation in ("sum", "mean") and flat.dtype in LONG_TYPES:
                    taken = self._sum(note, own, flat, operation)
                else:
                    taken = self._share_in_slices(note, own, flat, combine)
                if not taken:
                    refuse(self.comm, "all_reduce", operation, *like)
                if whole and len(like) == 1:
                    self._keep("all_reduce", operation, like, lambda lanes, one: lanes.all_reduce(note, one, operation))

    def _sum(self, note: int, own: Tensor, out: Tensor, operation: str) -> bool:
        """Take the algorithm that is the fastest for long tensors on these ranks."""
        if not self._exchange.agree(note):
            return False
        if own is not out:
            out.copy_(own)
        if self._auto is None:
            self._auto = Auto(self.comm)
        (self._auto if operation == "sum" else self._auto.mean)(out)
        return True

    def _share(self, note: int, own: Tensor, out: Tensor, combine: Reduce) -> bool:
        """Combine all of the tensors on every rank."""
        counts = [len(own)] * self.size
        return self._exchange.share(note, own, counts, _into(out, combine), self._everyone, self._everyone)

    def _share_in_slices(self, note: int, own: Tensor, out: Tensor, combine: Reduce) -> bool:
        """Combine a slice on each rank, and share the slices."""
        parts, results = chunks(own, self.size), chunks(out, self.size)
        counts, total = [len(part) for part in parts], torch.empty_like(results[self.rank])
        brought, take = [len(total)] * self.size, _into(total, combine)
        if not self._exchange.deal(note, parts, brought, max(counts), take, self._everyone):
            return False
        return self._exchange.share(note, total, counts, Copies(results), self._everyone, self._everyone)

    def reduce(
        self, tensor: Tensor, root: int, operation: str = "sum", *, factor: float | None = None, wait: bool = True
    ) -> Work | None:
        """Replace root's tensor by the combination of all ranks' tensors. Others keep theirs; see `all_reduce`."""
        return self._begin(wait, lambda: self._reduce(tensor, root, operation, factor))

    def _reduce(self, tensor: Tensor, root: int, operation: str, factor: float | None) -> None:
        check_rank(root, self.size, "root")
        combine = reduction(operation, tensor.dtype)
        with flattened(self.comm, tensor, write=self.rank == root) as flat:
            own = flat if factor is None else flat * factor
            note = note_of("reduce", tensor.dtype, OPERATIONS.index(operation), root, *tensor.shape)
            counts = [len(flat)] * self.size
            taken = self._exchange.share(note, own, counts, _into(flat, combine), self._everyone, [root])
        if not taken:
            refuse(self.comm, "reduce", f"{operation}, root {root}", tensor)

    def reduce_scatter(
        self, out: Tensor, given: Tensors, operation: str = "sum", *, factor: float | None = None, wait: bool = True
    ) -> Work | None:
        """Combine, of all ranks' tensors, the part that is this rank's.

        Args:
            out: overwritten.
            given: a tensor for each rank, those for one rank alike on all; or one tensor, cut into equal parts.
        """
        if wait and factor is None and self._made("reduce_scatter", operation, out, given):
            return None
        return self._begin(wait, lambda: self._reduce_scatter(out, given, operation, factor))

    def _reduce_scatter(self, out: Tensor, given: Tensors, operation: str, factor: float | None) -> None:
        combine = reduction(operation, out.dtype)
        with (
            for_each_rank(self.comm, given, "given", write=False) as parts,
            flattened(self.comm, out) as flat,
        ):
            counts = [len(part) for part in parts]
            require_fit("out", out, parts[self.rank])
            own = parts if factor is None else [part * factor for part in parts]
            note = note_of("reduce_scatter", out.dtype, OPERATIONS.index(operation), *counts)
            brought, longest = [len(flat)] * self.size, max(counts)
            taken = self._exchange.deal(note, own, brought, longest, _into(flat, combine), self._everyone)
        if not taken:
            refuse(self.comm, "reduce_scatter", operation, *each(given))
        self._keep(
            "reduce_scatter", operation, [out, given],
            lambda lanes, out, given: lanes.reduce_scatter(note, out, given, operation),
        )  # fmt: skip

    # --- copies -------------------------------------------------------------------------------------------------------
    def broadcast(self, tensor: Tensors, root: int = 0, *, wait: bool = True) -> Work | None:
        """Copy root's tensor, or each of several, into everyone's."""
        if wait and self._made("broadcast", root, tensor):
            return None
        return self._begin(wait, lambda: self._broadcast(tensor, root))

    def _broadcast(self, tensors: Tensors, root: int) -> None:
        check_rank(root, self.size, "root")
        others = [rank for rank in self._everyone if rank != root]
        with by_dtype(self.comm, tensors, write=self.rank != root) as joined:
            for like, flat in joined:
                note, counts = note_of("broadcast", flat.dtype, root, *shape_numbers(like)), [len(flat)] * self.size
                if not self._exchange.share(note, flat, counts, Copies({root: flat}), [root], others):
                    refuse(self.comm, "broadcast", root, *like)
                if len(like) == 1:
                    self._keep("broadcast", root, like, lambda lanes, one: lanes.broadcast(note, one, root))

    def all_gather(self, out: Tensors, tensor: Tensor, *, wait: bool = True) -> Work | None:
        """Collect all ranks' tensors.

        Args:
            out: a tensor for each rank, overwritten, alike on all ranks; or one tensor, of equal parts.
        """
        if wait and self._made("all_gather", "", out, tensor):
            return None
        return self._begin(wait, lambda: self._all_gather(out, tensor))

    def _all_gather(self, out: Tensors, tensor: Tensor) -> None:
        with (
            for_each_rank(self.comm, out, "out") as parts,
            flattened(self.comm, tensor, write=False) as own,
        ):
            counts = [len(part) for part in parts]
            require_fit("tensor", tensor, parts[self.rank])
            note = note_of("all_gather", tensor.dtype, *counts)
            taken = self._exchange.share(note, own, counts, Copies(parts), self._everyone, self._everyone)
        if not taken:
            refuse(self.comm, "all_gather", "", *each(out), tensor)
        self._keep("all_gather", "", [out, tensor], lambda lanes, out, own: lanes.all_gather(note, out, own))

    def gather(self, out: Sequence[Tensor] | None, tensor: Tensor, root: int = 0, *, wait: bool = True) -> Work | None:
        """Collect all ranks' tensors on root.

        Args:
            out: on root, a tensor for each rank, overwritten; None elsewhere.
        """
        return self._begin(wait, lambda: self._gather(out, tensor, root))

    def _gather(self, out: Sequence[Tensor] | None, tensor: Tensor, root: int) -> None:
        check_rank(root, self.size, "root")
        with for_each_rank(self.comm, out, "out", here=self.rank == root) as parts:
            brought = [tensor.numel() if rank == root else NONE for rank in self._everyone]
            wanted = [len(part) for part in parts]
            counts = tell_lengths(self.comm, self._exchange, "gather", tensor.dtype, root, brought, wanted)
            of_root = [row[root] for row in counts]
            with flattened(self.comm, tensor, write=False) as own:
                self._exchange.share(0, own, of_root, Copies(parts), self._everyone, [root])

    def scatter(
        self, out: Tensor, given: Sequence[Tensor] | None = None, root: int = 0, *, wait: bool = True
    ) -> Work | None:
        """Hand out root's tensors, one to each rank.

        Args:
            out: overwritten.
            given: on root, a tensor for each rank; None elsewhere.
        """
        return self._begin(wait, lambda: self._scatter(out, given, root))

    def _scatter(self, out: Tensor, given: Sequence[Tensor] | None, root: int) -> None:
        check_rank(root, self.size, "root")
        with for_each_rank(self.comm, given, "given", write=False, here=self.rank == root) as parts:
            sent = [len(part) for part in parts]
            wanted = [out.numel() if rank == root else NONE for rank in self._everyone]
            handed = tell_lengths(self.comm, self._exchange, "scatter", out.dtype, root, sent, wanted)[root]
            with flattened(self.comm, out) as flat:
                own, mine = parts or [flat] * self.size, [handed[self.rank]] * self.size
                self._exchange.deal(0, own, mine, max(handed), Copies({root: flat}), [root])

    def all_to_all(self, out: Tensors, given: Tensors, *, wait: bool = True) -> Work | None:
        """Hand each rank its part of `given`, and collect what all ranks have for this one.

        Args:
            out: a tensor for each rank, overwritten, of any lengths; or one tensor, of equal parts.
            given: the same.
        """
        if wait and self._made("all_to_all", "", out, given):
            return None
        return self._begin(wait, lambda: self._all_to_all(out, given))

    def _all_to_all(self, out: Tensors, given: Tensors) -> None:
        """Exchange at once where all parts of all ranks are as long; else tell each other how long they are, first."""
        with (
            for_each_rank(self.comm, out, "out") as outs,
            for_each_rank(self.comm, given, "given", write=False) as own,
        ):
            dtype, lengths, longest = outs[0].dtype, {len(part) for part in (*own, *outs)}, len(own[0])
            if len(lengths) > 1:
                self._exchange.agree(0)
                equal = False
            else:
                note, brought = note_of("all_to_all", dtype, longest), [longest] * self.size
                equal = self._exchange.deal(note, own, brought, longest, Copies(outs), self._everyone)
        if not equal:
            self._all_to_all_uneven(out, given)
        else:
            self._keep(
                "all_to_all", "", [out, given], lambda lanes, out, given: lanes.all_to_all(note, out, given),
                self._all_to_all_uneven,
            )  # fmt: skip

    def _all_to_all_uneven(self, out: Tensors, given: Tensors) -> None:
        with (
            for_each_rank(self.comm, out, "out") as outs,
            for_each_rank(self.comm, given, "given", write=False) as own,
        ):
            wanted, dtype = [len(part) for part in outs], outs[0].dtype
            counts = tell_lengths(
                self.comm, self._exchange, "all_to_all", dtype, 0, [len(part) for part in own], wanted
            )
            self._exchange.deal(0, own, wanted, max(map(max, counts)), Copies(outs), self._everyone)

    def barrier(self, *, wait: bool = True) -> Work | None:
        """Return once all ranks have called it."""
        return self._begin(wait, self._barrier)

    def _barrier(self) -> None:
        if not self._exchange.agree(note_of("barrier", torch.uint8)):
            refuse(self.comm, "barrier", "")

    def close(self) -> None:
        """Wait for all calls, and release memory, thread and messages."""
        self._queue.close()
        self._lanes.clear()
        if self._auto is not None:
            self._auto.close()
        self._exchange.close()
        self.comm.close()

    # --- what calls have in common ------------------------------------------------------------------------------------
    def _begin(self, wait: bool, call: Callable[[], None]) -> Work | None:
        if wait and not self._queue.waiting:
            with self._counted:
                call()
            return None
        work = self._queue.begin(call)
        if wait:
            work.wait()
            return None
        return work

    def _made(self, call: str, detail: str | int, one: Any, other: Any = None) -> bool:
        """Make a short call by its lane, if it has one; tell whether. Not while others are under way."""
        if self._queue.waiting:
            return False
        try:
            key: tuple[Any, ...] = (call, detail, *place(one))
            if other is not None:
                key += place(other)
        except AttributeError:  # of lists
            return False
        found = self._lanes.get(key)
        if found is None or not is_dense(one) or not (other is None or is_dense(other)):
            return False
        lane, otherwise = found
        with self._counted:
            alike = lane()
        if not alike:
            otherwise(*(tensor for tensor in (one, other) if tensor is not None))
        return True

    def _keep(
        self, call: str, detail: str | int, tensors: Sequence[Any], make: Callable[..., Lane],
        otherwise: Callable[..., None] | None = None,
    ) -> None:  # fmt: skip
        """Keep the lane of a call that has been made, if it is short; `otherwise` is called where ranks differ.

        Args:
            tensors: of the call; a rank brings the last one's elements.
        """
        if self._short is None or not all(map(plain, tensors)):
            return
        if all(one.nbytes for one in tensors) and tensors[-1].nbytes <= SLOT_BYTES and not tensors[0].dtype.is_complex:
            key: tuple[Any, ...] = (call, detail)
            for one in tensors:
                key += place(one)
            lane = make(self._short, *tensors)
            remember(self._lanes, key, (lane, otherwise or partial(refuse, self.comm, call, detail)))


def _into(out: Tensor, combine: Reduce) -> Take:
    """Return what combines the ranks' segments into the same segment of `out`."""

    def take(start: int, found: Sequence[Tensor]) -> None:
        into = out[start : start + len(found[0])]  # which may end before the longest rank's
        combine([one[: len(into)] for one in found], into)

    return take
