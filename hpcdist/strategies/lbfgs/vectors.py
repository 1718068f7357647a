"""Operate on numbered vectors: in this process, or on the shards that have a coordinate range of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

# The numbers of the vectors. Pairs (s, y) of the history follow, see `CurvaturePairs`.
POINT, X, GRADIENT, DIRECTION, SUM, HEAD, TAIL, KEPT, PAIRS = range(9)
# Operations: each travels as its code and four numbers.
COPY, SCALE, AXPY, DOT, GATHER, TAKE_UP, FINISH = range(7)
WORDS = 5  # of one operation
MOST = 16  # operations in one message


class Vectors(Protocol):
    """The operations that L-BFGS is made of."""

    def dot(self, a: int, b: int) -> float:
        """Compute the inner product of two vectors."""

    def axpy(self, into: int, vector: int, factor: float) -> None:
        """Add `factor` times a vector to another one."""

    def scale(self, vector: int, factor: float) -> None:
        """Multiply a vector by a number."""

    def copy(self, into: int, vector: int) -> None:
        """Copy a vector into another one."""


class LocalVectors:
    """Hold vectors in this process, each in flat parts of several types of numbers; one that is new is zero.

    Parts of half precision have float32 here, but for POINT.

    Args:
        like: the parts of vector POINT, which is this memory itself.
    """

    def __init__(self, like: Sequence[Tensor]):
        self._parts = {POINT: list(like)}

    def __getitem__(self, number: int) -> list[Tensor]:
        if number not in self._parts:
            self._parts[number] = [
                torch.zeros_like(part, dtype=torch.promote_types(part.dtype, torch.float32))
                for part in self._parts[POINT]
            ]
        return self._parts[number]

    @property
    def numbers(self) -> list[int]:
        """Return the numbers of the vectors that there are."""
        return sorted(self._parts)

    def dot(self, a: int, b: int) -> float:
        """Compute the inner product in float64."""
        return sum(torch.dot(one.double(), other.double()).item() for one, other in zip(self[a], self[b]))

    def axpy(self, into: int, vector: int, factor: float) -> None:
        for own, other in zip(self[into], self[vector]):
            own.add_(other, alpha=factor)

    def scale(self, vector: int, factor: float) -> None:
        for own in self[vector]:
            own.mul_(factor)

    def copy(self, into: int, vector: int) -> None:
        self.fill(into, self[vector])

    def fill(self, into: int, parts: Sequence[Tensor]) -> None:
        """Copy these parts into a vector."""
        for own, part in zip(self[into], parts, strict=True):
            own.copy_(part)


class RemoteVectors:
    """Let shards operate on their parts of vectors.

    Operations without a result wait for the next one that has one, and travel with it in one message.

    Args:
        call: sends the words of operations to all shards, and returns the sums over the shards of their results.
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
        if len(self._queue) == MOST * WORDS:
            self.flush()
        self._queue += [code, a, b, factor, more]

    def result(self, code: int, a: int = 0, b: int = 0) -> float:
        """Send an operation after all that wait, and return the sum of the shards' results."""
        self.queue(code, a, b)
        return self.flush()[-1]

    def flush(self) -> list[float]:
        """Send what waits; return its results once it is done on all shards."""
        words, self._queue = self._queue, []
        return self._call(words) if words else []
