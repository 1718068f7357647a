"""Parameters in blocks: each side of a block is the largest divisor of the matrix's side up to a limit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
from torch import Tensor

from hpcdist.comm.chunks import CACHED
from hpcdist.compress.base import Span


class Blocks(NamedTuple):
    """The blocks of a parameter as a matrix of `rows` × `columns`, each of `height` × `width`; a vector is one row."""

    rows: int
    columns: int
    height: int
    width: int

    @staticmethod
    def of(span: Span, side: int) -> Blocks:
        """Split a parameter into blocks of at most `side` × `side`; the first axis is the rows."""
        size = span.stop - span.start
        rows, columns = (span.shape[0], size // max(1, span.shape[0])) if len(span.shape) > 1 else (1, size)
        return Blocks(rows, columns, _side(rows, side), _side(columns, side))

    def view(self, values: Tensor) -> Tensor:
        """View the parameter's elements, shape (rows · columns,), as (down, height, across, width)."""
        return values.view(self.rows // self.height, self.height, self.columns // self.width, self.width)

    def chunks(self, *values: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield matching chunks of tensors, viewed as by `view`: rows of blocks, on the host as many as fit caches."""
        chunk_rows = max(1, CACHED // max(1, self.height * self.columns)) if values[0].is_cpu else max(1, self.rows)
        return zip(*(self.view(each).split(chunk_rows) for each in values), strict=True)

    def counts(self, indices: np.ndarray) -> np.ndarray:
        """Count the indices of elements in each block, shape (down, across)."""
        down, across = self.rows // self.height, self.columns // self.width
        block = indices // self.columns // self.height * across + indices % self.columns // self.width
        return np.bincount(block, minlength=down * across).reshape(down, across)


@cache
def _side(length: int, limit: int) -> int:
    """Return the largest divisor of `length` up to `limit`."""
    return max((d for low in range(1, math.isqrt(max(1, length)) + 1) if length % low == 0
                for d in (low, length // low) if d <= limit), default=1)  # fmt: skip
