"""Keep the history of L-BFGS, and compute its direction by the two-loop recursion."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpcdist.strategies.lbfgs.vectors import PAIRS, Vectors

LEAST_CURVATURE = 1e-10  # of a pair's s·y over |s||y|


@dataclass
class CurvaturePair:
    """A step s and the change y of the gradient along it: where they lie, s·y and y·y."""

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
    """Keep the newest pairs (s, y), at most `limit` of them. The vectors lie elsewhere; scalars alone are here.

    Attributes:
        kept: the oldest one first.
        spare: where the next pair is made, before it is added.
    """

    def __init__(self, vectors: Vectors, limit: int):
        self._vectors, self._limit = vectors, limit
        self.kept: list[CurvaturePair] = []
        self.spare = CurvaturePair(0, 0.0, 0.0)

    def add(self) -> bool:
        """Add the pair in `spare`, unless the loss is not convex along it; return whether it was added."""
        new, vectors = self.spare, self._vectors
        new.sy, new.yy, ss = vectors.dot(new.s, new.y), vectors.dot(new.y, new.y), vectors.dot(new.s, new.s)
        if not new.sy > LEAST_CURVATURE * math.sqrt(ss * new.yy):  # neither is NaN
            return False
        self.kept = [*self.kept, new][-self._limit :]
        self._choose_spare()
        return True

    def clear(self) -> None:
        """Forget all pairs."""
        self.kept.clear()

    def direction(self, into: int, gradient: int) -> None:
        """Compute −H·gradient, where H stands for the inverse Hessian: algorithm 7.4 of Nocedal and Wright.

        4m operations for m pairs, every other one with a result.
        """
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

    def state(self) -> list[list[float]]:
        return [[pair.place, pair.sy, pair.yy] for pair in self.kept]

    def load_state(self, state: list[list[float]]) -> None:
        self.kept = [CurvaturePair(int(place), sy, yy) for place, sy, yy in state][-self._limit :]
        self._choose_spare()

    def _choose_spare(self) -> None:
        taken = {pair.place for pair in self.kept}
        self.spare = CurvaturePair(min(set(range(self._limit + 1)) - taken), 0.0, 0.0)
