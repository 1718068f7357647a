"""Operations on numbered vectors: in this process, or on shards with a range of elements of each vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.common.state import State, copy_all, zero_all
from hpcdist.strategies.server.placement import Shard, create_shards

# The numbers of the vectors. POINT: where the loss is evaluated; X: the parameters; GRADIENT: at X; SUM: at POINT;
# HEAD, TAIL: SUM over samples shared with the last, the next batch; KEPT: TAIL at the last step's start. Then pairs.
POINT, X, GRADIENT, DIRECTION, SUM, HEAD, TAIL, KEPT, PAIRS = range(9)
# Operations, see `RemoteVectors`. Each is sent as its code and four numbers, 0 if unused, in this order:
# COPY into, from; SCALE vector, -, factor; AXPY into, vector, factor; DOT a, b; GATHER evaluation, number of portions,
# of these in the batch's head, in its tail.
COPY, SCALE, AXPY, DOT, GATHER, LOAD_MODEL, FINISH = range(7)
RETURNING = (DOT, LOAD_MODEL)  # the operations that have a result
FIELDS = 5  # of one operation
MAX_OPERATIONS = 16  # operations in one message


class LocalVectors:
    """Vectors in this process; each has a flat part per dtype, and starts as zeros. Half precision is stored in
    float32, except in POINT.

    Args:
        point: the parts of vector POINT, which is this memory itself.
    """

    def __init__(self, point: Sequence[Tensor]):
        self._parts = {POINT: list(point)}

    def __getitem__(self, number: int) -> list[Tensor]:
        if number not in self._parts:
            self._parts[number] = [
                torch.zeros_like(part, dtype=torch.promote_types(part.dtype, torch.float32))
                for part in self._parts[POINT]
            ]
        return self._parts[number]

    def dot(self, a: int, b: int) -> float:
        """Return the inner product, computed in float64."""
        return sum(torch.dot(left.double(), right.double()).item() for left, right in zip(self[a], self[b]))

    def axpy(self, into: int, vector: int, factor: float) -> None:
        """Add `factor` times a vector to another one."""
        for target, source in zip(self[into], self[vector]):
            target.add_(source, alpha=factor)

    def scale(self, vector: int, factor: float) -> None:
        for part in self[vector]:
            part.mul_(factor)

    def copy(self, into: int, vector: int) -> None:
        copy_all(self[into], self[vector])


class RemoteVectors:
    """Sends operations to shards. Operations without a result are queued, and sent with the next one with a result.

    Args:
        call: sends the numbers of operations to all shards, and returns each result, summed over the shards.
    """

    def __init__(self, call: Callable[[list[float]], list[float]]):
        self._call, self._queue = call, list[float]()

    def dot(self, a: int, b: int) -> float:
        return self.result(DOT, a, b)

    def axpy(self, into: int, vector: int, factor: float) -> None:
        self.queue(AXPY, into, vector, factor)

    def scale(self, vector: int, factor: float) -> None:
        self.queue(SCALE, vector, factor=factor)

    def copy(self, into: int, vector: int) -> None:
        self.queue(COPY, into, vector)

    def queue(self, code: int, a: int = 0, b: int = 0, factor: float = 0.0, more: int = 0) -> None:
        """Queue an operation, to be sent with the next one that has a result."""
        if len(self._queue) == MAX_OPERATIONS * FIELDS:
            self.flush()
        self._queue += [code, a, b, factor, more]

    def result(self, code: int, a: int = 0, b: int = 0) -> float:
        """Send the queue and this operation; return the sum of the shards' results."""
        self.queue(code, a, b)
        return self.flush()[-1]

    def flush(self) -> list[float]:
        """Send the queue; return the summed results of its operations once all shards have run it."""
        operations, self._queue = self._queue, []
        return self._call(operations) if operations else []


class SharedPoint:
    """Collective. Allocate windows on the shards with the point at which workers evaluate the loss.

    Args:
        ranks: the shards' ranks.
        params: flat parameters; the shards have ranges of about equal bytes.

    Attributes:
        shards: the shard of each rank.
        own: this rank's part of the point, one tensor per flat parameter; empty ones on ranks without a shard.
    """

    def __init__(self, comm: Communicator, ranks: Sequence[int], params: Sequence[Tensor]):
        self.shards: dict[int, Shard] = dict(zip(ranks, create_shards(params, len(ranks)), strict=True))
        local_parts = self.shards[comm.rank].of(params) if comm.rank in self.shards else [flat[:0] for flat in params]
        self._windows = [comm.window(part.numel(), part.dtype) for part in local_parts]
        self.own = [window.local for window in self._windows]

    def fetch(self, into: Sequence[Tensor]) -> None:
        """Copy the point from all shards into flat parameters."""
        for rank, shard in self.shards.items():
            for window, part in zip(self._windows, shard.of(into), strict=True):
                if part.numel():
                    window.get(part, rank)

    def close(self) -> None:
        """Collective. Close the windows."""
        self.own = []  # views of the windows' memory
        for window in self._windows:
            window.close()


class HistoryShard:
    """Sum the gradients of portions, and run the coordinator's operations on this range of all vectors.

    The first gradient of each (evaluation, portion) is used. Gradients are added in the order of the portions, and kept
    until their turn, so that the sum is bitwise independent of which workers compute them and when.

    Args:
        state: declares the vectors that later steps need.
        history: number of pairs in the history.
        overlaps: a batch repeats a part of the last batch.

    Attributes:
        has_finished: the coordinator has ended the period of service.
    """

    def __init__(self, point: SharedPoint, shard: Shard, model: FlatModel, state: State, history: int, overlaps: bool):
        self._shard, self._model = shard, model
        self.vectors = LocalVectors(point.own)
        pairs = range(PAIRS, PAIRS + 2 * (history + 1))  # and one that is being computed
        for number in (X, GRADIENT, *[KEPT] * overlaps, *pairs):
            own = self.vectors[number]
            state.sharded(f"vector {number}", tensors=own, reshard="first", ranges=shard.ranges, optional=True)
        for number in (POINT, DIRECTION, SUM, *[HEAD, TAIL] * overlaps):
            state.scratch(self.vectors[number])
        self.has_finished = False
        self._evaluation = self._count = self._heads = self._tails = self._next = 0
        self._early: dict[int, tuple[float, list[Tensor]]] = {}

    # --- gradients ------------------------------------------------------------------------------------------------
    def push(self, evaluation: int, portion: int, weight: float, parts: Sequence[Tensor]) -> None:
        """Add `weight` times a portion's gradient, unless it was added before or belongs to an older point."""
        if evaluation != self._evaluation or portion < self._next or portion in self._early:
            return
        if portion > self._next:
            self._early[portion] = weight, [part.clone() for part in parts]
            return
        self._add(weight, parts)
        while self._next in self._early:
            self._add(*self._early.pop(self._next))

    def _add(self, weight: float, parts: Sequence[Tensor]) -> None:
        """Add the gradient of portion `_next`; to HEAD or TAIL, too, if it is of the batch's head or tail."""
        sums = [SUM] + [HEAD] * (self._next < self._heads)
        for number in sums + [TAIL] * (self._next >= self._count - self._tails):
            for total, part in zip(self.vectors[number], parts, strict=True):
                total.add_(part, alpha=weight)
        self._next += 1

    # --- operations -----------------------------------------------------------------------------------------------
    def run(self, operations: Sequence[float]) -> list[float]:
        """Run operations, FIELDS numbers each; return the results of those with a result."""
        results = []
        for offset in range(0, len(operations), FIELDS):
            code, a, b, factor, more = operations[offset : offset + FIELDS]
            result = self._run(int(code), int(a), int(b), factor, int(more))
            if result is not None:
                results.append(result)
        return results

    def _run(self, code: int, a: int, b: int, factor: float, more: int) -> float | None:
        if code == DOT:
            return self.vectors.dot(a, b)
        if code == LOAD_MODEL:
            return self._load_model()
        if code == AXPY:
            self.vectors.axpy(a, b, factor)
        elif code == SCALE:
            self.vectors.scale(a, factor)
        elif code == COPY:
            self.vectors.copy(a, b)
        elif code == GATHER:
            self._gather(a, b, int(factor), more)  # its four numbers, in the same fields
        elif code == FINISH:
            self.show()
            self.has_finished = True
        return None

    def _gather(self, evaluation: int, count: int, heads: int, tails: int) -> None:
        """Start the sums of another evaluation, of `count` portions: `heads` of the head, `tails` of the tail."""
        self._evaluation, self._count, self._heads, self._tails = evaluation, count, heads, tails
        self._next = 0
        self._early.clear()
        for number in (SUM, *[HEAD] * (heads > 0), *[TAIL] * (tails > 0)):
            zero_all(self.vectors[number])

    def _load_model(self) -> float:
        """Copy the model's parameters to X and POINT; return 1 if the loop has changed them, else 0."""
        params, x = self._shard.of(self._model.params), self.vectors[X]
        same = all(torch.equal(param, part.to(param)) for param, part in zip(params, x, strict=True))
        if not same:
            copy_all(x, params)
        self.vectors.copy(POINT, X)
        return 0.0 if same else 1.0

    def show(self) -> None:
        """Copy the parameters into the model, for the loop to evaluate or save."""
        copy_all(self._shard.of(self._model.params), self.vectors[X])
