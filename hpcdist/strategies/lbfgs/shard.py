"""Hold one coordinate range of parameters, gradients and history, and operate on it as it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpcdist.model.flat import FlatModel
from hpcdist.strategies.lbfgs import vectors as ops
from hpcdist.strategies.lbfgs.memory import ShardMemory
from hpcdist.strategies.lbfgs.vectors import LocalVectors
from hpcdist.strategies.server.placement import Shard

PASSING = {ops.POINT, ops.DIRECTION, ops.SUM, ops.HEAD, ops.TAIL}  # of one step


class HistoryShard:
    """Sum the gradients of portions, and run the coordinator's operations on this range of all vectors.

    Of each (evaluation, portion) the first gradient counts. They are added in the order of the portions, so that the
    sum is the same to the bit whoever computes them and whenever they come; those that are early are kept until then.

    Attributes:
        has_finished: the coordinator has ended the period of service.
    """

    def __init__(self, memory: ShardMemory, shard: Shard, model: FlatModel):
        self._memory, self._shard, self._model = memory, shard, model
        self.vectors = LocalVectors(memory.point)
        self.has_finished = False
        self._evaluation = self._count = self._heads = self._tails = self._next = 0
        self._early: dict[int, tuple[float, list[Tensor]]] = {}

    # --- gradients ------------------------------------------------------------------------------------------------
    def push(self, evaluation: int, portion: int, weight: float, parts: Sequence[Tensor]) -> None:
        """Count a portion's gradient `parts`, times `weight`, unless it is counted already, or of an older point."""
        if evaluation != self._evaluation or portion < self._next or portion in self._early:
            return
        if portion > self._next:
            self._early[portion] = weight, [part.clone() for part in parts]
            return
        self._add(weight, parts)
        while self._next in self._early:
            self._add(*self._early.pop(self._next))

    def push_of(self, worker: int, evaluation: float, portion: float, weight: float) -> None:
        """Count the gradient that a worker has put into its slot."""
        self.push(int(evaluation), int(portion), weight, self._memory.pushed(worker))

    def _add(self, weight: float, parts: Sequence[Tensor]) -> None:
        sums = [ops.SUM] + [ops.HEAD] * (self._next < self._heads)
        for number in sums + [ops.TAIL] * (self._next >= self._count - self._tails):
            for total, part in zip(self.vectors[number], parts, strict=True):
                total.add_(part, alpha=weight)
        self._next += 1

    # --- operations -----------------------------------------------------------------------------------------------
    def run(self, words: Sequence[float]) -> list[float]:
        """Run operations, and return the results of those that have one."""
        results = []
        for at in range(0, len(words), ops.WORDS):
            code, a, b, factor, more = words[at : at + ops.WORDS]
            result = self._run(int(code), int(a), int(b), factor, int(more))
            if result is not None:
                results.append(result)
        return results

    def _run(self, code: int, a: int, b: int, factor: float, more: int) -> float | None:
        if code == ops.DOT:
            return self.vectors.dot(a, b)
        if code == ops.TAKE_UP:
            return self._take_up()
        if code == ops.AXPY:
            self.vectors.axpy(a, b, factor)
        elif code == ops.SCALE:
            self.vectors.scale(a, factor)
        elif code == ops.COPY:
            self.vectors.copy(a, b)
        elif code == ops.GATHER:
            self._gather(a, b, int(factor), more)
        elif code == ops.FINISH:
            self.show()
            self.has_finished = True
        return None

    def _gather(self, evaluation: int, count: int, heads: int, tails: int) -> None:
        """Begin the sums of another evaluation."""
        self._evaluation, self._count, self._heads, self._tails = evaluation, count, heads, tails
        self._next = 0
        self._early.clear()
        for number in (ops.SUM, *[ops.HEAD] * (heads > 0), *[ops.TAIL] * (tails > 0)):
            for total in self.vectors[number]:
                total.zero_()

    def _take_up(self) -> float:
        """Take up the parameters in the model; return 1 where they are not those that were shown there, else 0."""
        own, there = self._shard.of(self._model.params), self.vectors[ops.X]
        same = all(torch.equal(mine, part.to(mine)) for mine, part in zip(own, there, strict=True))
        if not same:
            self.vectors.fill(ops.X, own)
        self.vectors.copy(ops.POINT, ops.X)
        return 0.0 if same else 1.0

    def show(self) -> None:
        """Copy the parameters into the model, for loops whose rank evaluates or saves it."""
        for mine, part in zip(self._shard.of(self._model.params), self.vectors[ops.X], strict=True):
            mine.copy_(part)

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        numbers = [number for number in self.vectors.numbers if number not in PASSING]
        return {"numbers": numbers, "vectors": [self.vectors[number] for number in numbers]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what `state()` gave, or the same vectors whole, of which this shard has its range."""
        for number, parts in zip(state.get("numbers", ()), state.get("vectors", ())):
            own = [
                part if part.numel() == stop - start else part[start:stop]
                for part, (start, stop) in zip(parts, self._shard.ranges, strict=True)
            ]
            self.vectors.fill(number, own)
