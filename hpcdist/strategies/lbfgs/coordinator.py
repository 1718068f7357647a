"""Coordinate L-BFGS by numbers alone: the steps of the algorithm, and who computes which portion."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hpcdist.errors import NonFiniteError
from hpcdist.strategies.lbfgs import vectors as ops
from hpcdist.strategies.lbfgs.line_search import SearchPoint, strong_wolfe
from hpcdist.strategies.lbfgs.portions import Division, JointBatch, Pace, Portions, divide
from hpcdist.strategies.lbfgs.recursion import CurvaturePairs
from hpcdist.strategies.lbfgs.vectors import RemoteVectors

WORK, DONE = range(2)  # replies to workers
Message = Sequence[float]


@dataclass(frozen=True)
class LbfgsSettings:
    """The settings of the algorithm, see `Sandblaster.Config`.

    Args:
        portions: into which a batch is cut.
        first_length: the longest first step where there is no history.
        resolution: relative difference of losses below which they count as equal.
        skips: goes on without a step where loss or gradient are not finite at its beginning.
    """

    history: int
    portions: int
    c1: float
    c2: float
    max_evaluations: int
    first_length: float = 1.0
    resolution: float = 2e-16
    skips: bool = False


class Coordinator:
    """Take steps of L-BFGS on vectors that lie on shards, and hand out the portions of every evaluation to workers.

    Holds no thread and does not communicate by itself: `receive` takes a worker's message, and `take_replies` returns
    what is to be sent.

    Args:
        vectors: on the shards.
        report: is given the number of steps and, where something was out of the ordinary, an event's text.

    Attributes:
        clock: how many steps have been taken.
        evaluations: how many evaluations of the loss so far.
    """

    def __init__(self, settings: LbfgsSettings, vectors: RemoteVectors, report: Callable[[int, str | None], None]):
        self._settings, self._vectors, self._report = settings, vectors, report
        self.clock = self.evaluations = 0
        self._pairs = CurvaturePairs(vectors, settings.history)
        self._known: float | None = None  # the loss at X on the whole data set, whose gradient is there
        self._pending = 0  # so many samples of the next batch give the y of the spare pair, which has its s; 0: none
        self._steps: Generator[None, float, float] | None = None
        self._division = Division((0, 1), 0, 0)
        self._portions: Portions | None = None
        self._pace = Pace()
        self._losses: list[float] = []
        self._idle: dict[int, int] = {}  # workers that wait: the step that they are in
        self._done: list[float] = [DONE, 0.0, 0.0]
        self._event: str | None = None

    # --- workers --------------------------------------------------------------------------------------------------
    def receive(
        self, now: float, worker: int, clock: float, evaluation: float, portion: float, loss: float, *batch: float
    ) -> None:
        """Take a worker's message: it is idle in step `clock`, and has perhaps computed a portion of an evaluation.

        Args:
            now: the time, in seconds.
            batch: the numbers of the step's `JointBatch`.
        """
        self._idle[worker] = int(clock)
        self._pace.end(worker, now)
        if self._steps is None and clock == self.clock:
            samples, head, tail, whole = map(int, batch)
            self._steps = self._step(JointBatch(samples, head=head, tail=tail, whole=bool(whole)))
            self._go_on(None)
        current = evaluation == self.evaluations and self._portions is not None
        if evaluation and current and self._portions.take(int(portion)):
            self._losses[int(portion)] = loss * self._division.weight(int(portion))
            if self._portions.is_complete:
                self._portions = None
                self._go_on(math.fsum(self._losses) if all(map(math.isfinite, self._losses)) else math.nan)

    def patience_s(self, now: float) -> float | None:
        """Return the seconds after which to `take_replies` again, although no message has come; None: never."""
        if not self._idle or self._portions is None:
            return None
        return min(self._pace.due(now).values(), default=math.inf) - now

    def take_replies(self, now: float) -> list[tuple[int, list[float]]]:
        """Return replies to those of the idle workers that have something to do, or whose step is done."""
        replies: list[tuple[int, list[float]]] = []
        for worker, clock in sorted(self._idle.items(), key=lambda item: self._pace.mean_s(item[0])):
            if clock < self.clock:
                replies.append((worker, [*self._done]))
            elif self._portions is not None and (portion := self._portions.give(worker, now)) is not None:
                replies.append((worker, [WORK, self.evaluations, portion]))
            else:
                continue
            del self._idle[worker]
        return replies

    def forget(self, workers: Iterable[int]) -> None:
        """Go on without workers that have died: what they had is handed out again."""
        for worker in workers:
            self._idle.pop(worker, None)
        self._pace.forget(workers)
        if self._portions is not None:
            self._portions.forget(workers)

    def _go_on(self, loss: float | None) -> None:
        """Go on with the step, once an evaluation has the loss that it asked for."""
        try:
            next(self._steps) if loss is None else self._steps.send(loss)
        except StopIteration as end:
            self._steps = None
            self.clock += 1
            self._done = [DONE, end.value, self.evaluations]
            event, self._event = self._event, None
            self._report(1, event)

    # --- the algorithm --------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Begin a period of service: take up parameters that the loop has changed, and forget what they were."""
        if self._vectors.result(ops.TAKE_UP):
            self._pairs.clear()
            self._known, self._pending = None, 0

    def finish(self) -> None:
        """End a period of service."""
        self._vectors.copy(ops.POINT, ops.X)
        self._vectors.queue(ops.FINISH)
        self._vectors.flush()

    def _step(self, batch: JointBatch) -> Generator[None, float, float]:
        """Take a step on a batch, yielding where the loss at POINT is to be evaluated; return the loss before it."""
        vectors = self._vectors
        if not batch.whole or self._known is None:
            vectors.copy(ops.POINT, ops.X)
            self._known = yield from self._evaluate(batch)
            vectors.copy(ops.GRADIENT, ops.SUM)
        loss, square = self._known, vectors.dot(ops.GRADIENT, ops.GRADIENT)
        if not math.isfinite(loss + square):
            self._known, self._pending = None, 0
            return self._refuse(loss)
        self._add_pair_on_overlap(batch)
        if square > 0.0:
            yield from self._move(batch, loss, square)
        if not batch.whole:
            self._known = None
        return loss

    def _move(self, batch: JointBatch, loss: float, square: float) -> Generator[None, float, None]:
        """Search along L-BFGS's direction for the next point, and add a pair to the history."""
        vectors, pairs = self._vectors, self._pairs
        pairs.direction(ops.DIRECTION, ops.GRADIENT)
        slope = vectors.dot(ops.GRADIENT, ops.DIRECTION)
        if not slope < 0.0:  # rounding, or a history of other batches
            pairs.clear()
            pairs.direction(ops.DIRECTION, ops.GRADIENT)
            slope = -square
        found = yield from self._search(batch, loss, slope, math.sqrt(square))
        if found is None:
            pairs.clear()
            vectors.copy(ops.POINT, ops.X)
            vectors.flush()
            self.evaluations += 1  # workers then fetch it
            self._event = f"no step: {self._settings.max_evaluations} evaluations along the direction found none"
            return
        new = pairs.spare
        vectors.copy(new.s, ops.DIRECTION)
        vectors.scale(new.s, found.length)
        vectors.copy(ops.X, ops.POINT)
        if batch.tail:
            self._pending = batch.tail
        else:
            self._change_of(new.y, ops.SUM, ops.GRADIENT)
            pairs.add()
        vectors.copy(ops.GRADIENT, ops.SUM)
        self._known = found.loss

    def _search(
        self, batch: JointBatch, loss: float, slope: float, norm: float
    ) -> Generator[None, float, SearchPoint | None]:
        """Search for the step's length; POINT, and the gradient in SUM, are then those of the one to take."""
        vectors, settings = self._vectors, self._settings
        first = 1.0 if self._pairs.kept else min(1.0, settings.first_length / norm)
        search = strong_wolfe(
            loss, slope, first, c1=settings.c1, c2=settings.c2, evaluations=settings.max_evaluations,
            noise=settings.resolution * abs(loss), longest=math.inf if batch.whole else first,
        )  # fmt: skip
        length = next(search)
        while True:
            vectors.copy(ops.POINT, ops.X)
            vectors.axpy(ops.POINT, ops.DIRECTION, length)
            there = yield from self._evaluate(batch)
            try:
                length = search.send((there, vectors.dot(ops.SUM, ops.DIRECTION)))
            except StopIteration as end:
                return end.value

    def _evaluate(self, batch: JointBatch) -> Generator[None, float, float]:
        """Hand out the portions of a batch; return its mean loss at POINT, whose gradient SUM then has."""
        self._division = division = divide(batch, self._settings.portions)
        self.evaluations += 1
        self._vectors.queue(ops.GATHER, self.evaluations, division.count, division.heads, division.tails)
        self._vectors.flush()
        self._portions, self._losses = Portions(division.count, self._pace), [0.0] * division.count
        return (yield)

    def _add_pair_on_overlap(self, batch: JointBatch) -> None:
        """Add the pair whose y is of the samples that this batch shares with the one before, at both points.

        Where it shares others than were foreseen, as on another number of workers, there is no y, and no pair is added.
        """
        vectors = self._vectors
        if self._pending and self._pending == batch.head:
            vectors.scale(ops.HEAD, batch.samples / batch.head)
            self._change_of(self._pairs.spare.y, ops.HEAD, ops.KEPT)
            self._pairs.add()
        self._pending = 0
        if batch.tail:
            vectors.copy(ops.KEPT, ops.TAIL)
            vectors.scale(ops.KEPT, batch.samples / batch.tail)

    def _change_of(self, y: int, after: int, before: int) -> None:
        self._vectors.copy(y, after)
        self._vectors.axpy(y, before, -1.0)

    def _refuse(self, loss: float) -> float:
        """Leave out a step whose loss or gradient is not finite at its beginning.

        Raises:
            NonFiniteError: it is not to be left out.
        """
        text = f"NaN or infinite loss or gradient at step {self.clock + 1}"
        if not self._settings.skips:
            raise NonFiniteError(
                f"loss and gradients must be finite where a step begins; got {text}. Scale the data or the initial "
                "values, or set strategy.on_nonfinite = 'skip' to leave such batches out."
            )
        self._event = f"skipped: {text}"
        return loss

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        return {
            "clock": self.clock, "pairs": self._pairs.state(), "known": self._known,
            "pending": self._pending, "spare": self._pairs.spare.place,
        }  # fmt: skip

    def load_state(self, state: dict[str, Any]) -> None:
        if not state:
            return
        self.clock, self._known = state["clock"], state["known"]
        self._pairs.load_state(state["pairs"])
        self._pending, self._pairs.spare.place = state["pending"], state["spare"]
