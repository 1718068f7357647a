"""The L-BFGS algorithm, on vectors of other ranks: only scalars are here."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hpcdist.config.settings import Field
from hpcdist.errors import NonFiniteError
from hpcdist.strategies.base import Strategy
from hpcdist.strategies.lbfgs import vectors as ops
from hpcdist.strategies.lbfgs.line_search import SearchPoint, strong_wolfe
from hpcdist.strategies.lbfgs.portions import JointBatch
from hpcdist.strategies.lbfgs.vectors import PAIRS, LocalVectors, RemoteVectors

_log = logging.getLogger("hpcdist")
LEAST_CURVATURE = 1e-10  # of a pair's s·y over |s||y|


@dataclass
class CurvaturePair:
    """A pair of a step s and the gradient's change y along it: the numbers of their vectors, s·y and y·y."""

    place: int
    sy: float
    yy: float

    @property
    def s(self) -> int:
        return PAIRS + 2 * self.place

    @property
    def y(self) -> int:
        return self.s + 1


class CurvaturePairs:
    """Keep the newest pairs (s, y), at most `limit`. The vectors are on the shards, only scalars are here.

    Attributes:
        kept: the pairs, oldest first.
        spare: the next pair, whose vectors are computed before it is added.
    """

    def __init__(self, vectors: RemoteVectors | LocalVectors, limit: int):
        self._vectors, self.limit = vectors, limit
        self.kept: list[CurvaturePair] = []
        self.spare = CurvaturePair(0, 0.0, 0.0)

    def add(self) -> bool:
        """Add the pair in `spare`, unless the loss is not convex along it; return whether it was added."""
        new, vectors = self.spare, self._vectors
        new.sy, new.yy, ss = vectors.dot(new.s, new.y), vectors.dot(new.y, new.y), vectors.dot(new.s, new.s)
        if not new.sy > LEAST_CURVATURE * math.sqrt(ss * new.yy):  # neither is NaN
            return False
        self.kept = [*self.kept, new][-self.limit :]
        self._choose_spare()
        return True

    def direction(self, into: int, gradient: int) -> None:
        """Set `into` to −H·gradient, for the approximate inverse Hessian H: algorithm 7.4 of Nocedal and Wright."""
        vectors, alphas = self._vectors, []
        vectors.copy(into, gradient)
        for pair in reversed(self.kept):
            alphas.append(vectors.dot(pair.s, into) / pair.sy)
            vectors.axpy(into, pair.y, -alphas[-1])
        if self.kept:
            vectors.scale(into, self.kept[-1].sy / self.kept[-1].yy)
        for pair, alpha in zip(self.kept, reversed(alphas)):
            vectors.axpy(into, pair.s, alpha - vectors.dot(pair.y, into) / pair.sy)
        vectors.scale(into, -1.0)

    def load(self, saved: Sequence[tuple[int, float, float]]) -> None:
        """Load saved pairs (index, s·y, y·y); a smaller limit than that of the saved run drops pairs."""
        kept = [CurvaturePair(place, sy, yy) for place, sy, yy in saved if place <= self.limit]
        self.kept = kept[-self.limit :]
        if len(self.kept) < len(saved):
            _log.warning(
                "strategy.history is %d, less than in the run that saved the checkpoint: %d of its %d pairs (s, y) "
                "are dropped, and the next steps may be shorter.",
                self.limit, len(saved) - len(self.kept), len(saved),
            )  # fmt: skip
        self._choose_spare()

    def _choose_spare(self) -> None:
        taken = {pair.place for pair in self.kept}
        self.spare = CurvaturePair(min(set(range(self.limit + 1)) - taken), 0.0, 0.0)


class LbfgsConfig(Strategy.Config):
    """Options of the algorithm."""

    history: int = Field(10, "number of pairs (s, y) in the history of L-BFGS", ge=1)
    c1: float = Field(1e-4, "c1 of the strong Wolfe conditions: sufficient decrease", gt=0, lt=0.5)
    c2: float = Field(0.9, "c2 of the strong Wolfe conditions: curvature", gt=0, lt=1)
    max_evaluations: int = Field(20, "evaluations of the loss in one line search", ge=2)


class StepEnd(NamedTuple):
    """The end of a step: the loss at its start, and the text of an event, if there was one.

    Args:
        returned: the step was given up: POINT is its start again, but the last evaluation was at another point.
    """

    loss: float
    event: str | None = None
    returned: bool = False


Steps = Generator[None, float, StepEnd]  # yields when the loss at POINT is needed, and receives it by `send`


class Lbfgs:
    """Minimise a loss that others evaluate, step by step.

    Args:
        vectors: parameters, gradients and history, on the shards.
        first_length: the longest first step without history.
        resolution: relative difference of losses up to which they count as equal.
    """

    def __init__(
        self, config: LbfgsConfig, vectors: RemoteVectors, first_length: float = 1.0, resolution: float = 2e-16
    ):
        self._config, self._vectors = config, vectors
        self._first_length, self._resolution = first_length, resolution
        self._pairs = CurvaturePairs(vectors, config.history)
        self._known: float | None = None  # the loss at X, if the next step can use it; its gradient is in GRADIENT
        self._pending = 0  # first samples of the next batch, for the y of the spare pair, which has its s; 0: no pair

    def load_model(self) -> None:
        """Load parameters that the loop has changed, and reset what depends on the old ones."""
        if self._vectors.result(ops.LOAD_MODEL):
            self._pairs.kept.clear()
            self._known, self._pending = None, 0

    def step(self, batch: JointBatch, number: int) -> Steps:
        """Take a step on a batch; yield whenever the loss at POINT is needed, with its gradient in SUM.

        Args:
            number: number of the step, for messages.

        Raises:
            NonFiniteError: the first loss or gradient is not finite, and such a step is not to be skipped.
        """
        vectors = self._vectors
        if not batch.whole or self._known is None:
            vectors.copy(ops.POINT, ops.X)
            self._known = yield
            vectors.copy(ops.GRADIENT, ops.SUM)
        loss, square = self._known, vectors.dot(ops.GRADIENT, ops.GRADIENT)
        if not math.isfinite(loss + square):
            self._known, self._pending = None, 0
            return StepEnd(loss, self._refuse(number))
        self._add_pair_on_overlap(batch)
        moved = square == 0.0 or (yield from self._move(batch, loss, square))  # gradient 0: stay at this minimum
        if not batch.whole:
            self._known = None
        if moved:
            return StepEnd(loss)
        text = f"no step: {self._config.max_evaluations} evaluations along the direction found none"
        return StepEnd(loss, text, returned=True)

    def _move(self, batch: JointBatch, loss: float, square: float) -> Generator[None, float, bool]:
        """Search along L-BFGS's direction, move X to the point found, and add a pair; return False if none is found."""
        vectors, pairs = self._vectors, self._pairs
        pairs.direction(ops.DIRECTION, ops.GRADIENT)
        slope = vectors.dot(ops.GRADIENT, ops.DIRECTION)
        if not slope < 0.0:  # rounding, or a history of other batches
            pairs.kept.clear()
            pairs.direction(ops.DIRECTION, ops.GRADIENT)
            slope = -square
        found = yield from self._search(batch, loss, slope, math.sqrt(square))
        if found is None:
            pairs.kept.clear()
            vectors.copy(ops.POINT, ops.X)
            vectors.flush()
            return False
        new = pairs.spare
        vectors.copy(new.s, ops.DIRECTION)
        vectors.scale(new.s, found.length)
        vectors.copy(ops.X, ops.POINT)
        if batch.tail:
            self._pending = batch.tail
        else:
            self._subtract(new.y, ops.SUM, ops.GRADIENT)
            pairs.add()
        vectors.copy(ops.GRADIENT, ops.SUM)
        self._known = found.loss
        return True

    def _search(
        self, batch: JointBatch, loss: float, slope: float, norm: float
    ) -> Generator[None, float, SearchPoint | None]:
        """Search for the step's length; leave its point in POINT and the gradient there in SUM. None: not found."""
        vectors, config = self._vectors, self._config
        first = 1.0 if self._pairs.kept else min(1.0, self._first_length / norm)
        search = strong_wolfe(
            loss, slope, first, c1=config.c1, c2=config.c2, evaluations=config.max_evaluations,
            noise=self._resolution * abs(loss), longest=math.inf if batch.whole else first,
        )  # fmt: skip
        length = next(search)
        while True:
            vectors.copy(ops.POINT, ops.X)
            vectors.axpy(ops.POINT, ops.DIRECTION, length)
            loss_there = yield
            try:
                length = search.send((loss_there, vectors.dot(ops.SUM, ops.DIRECTION)))
            except StopIteration as end:
                return end.value

    def _add_pair_on_overlap(self, batch: JointBatch) -> None:
        """Add the pair of the last step, whose y is the change of the gradient of samples in both batches.

        The first `head` samples of this batch are the last `tail` of the one before. HEAD is their gradient at the new
        point; KEPT, from the call before, at the old one. Both are kept as sums divided by the whole batch, hence the
        factors. If the number of shared samples differs, as after a change of the workers, the pair is dropped.
        """
        vectors = self._vectors
        if self._pending and self._pending == batch.head:
            vectors.scale(ops.HEAD, batch.samples / batch.head)
            self._subtract(self._pairs.spare.y, ops.HEAD, ops.KEPT)
            self._pairs.add()
        self._pending = 0
        if batch.tail:
            vectors.copy(ops.KEPT, ops.TAIL)
            vectors.scale(ops.KEPT, batch.samples / batch.tail)

    def _subtract(self, y: int, after: int, before: int) -> None:
        self._vectors.copy(y, after)
        self._vectors.axpy(y, before, -1.0)

    def _refuse(self, number: int) -> str:
        """Skip a step that starts with a loss or gradient that is not finite; return the event."""
        text = f"NaN or infinite loss or gradient at step {number}"
        if self._config.on_nonfinite != "skip":
            raise NonFiniteError(
                f"loss and gradients must be finite where a step begins; got {text}. Scale the data or the initial "
                "values, or set strategy.on_nonfinite = 'skip' to leave such batches out."
            )
        return f"skipped: {text}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "pairs": [[pair.place, pair.sy, pair.yy] for pair in self._pairs.kept], "known": self._known,
            "pending": self._pending, "spare": self._pairs.spare.place,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._known = state["known"]
        self._pairs.load(state["pairs"])
        if state["spare"] <= self._pairs.limit:  # else the spare pair, with its s, is dropped, too
            self._pending, self._pairs.spare.place = state["pending"], state["spare"]
