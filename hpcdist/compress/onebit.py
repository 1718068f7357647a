"""1-bit: the sign of every element, with the mean of the positive and the mean of the other elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.chunks import CACHED, slices
from hpcdist.compress.base import Compressor, Span
from hpcdist.compress.coding.elements import BITS, MAX_SCALE, add_by_bit, views
from hpcdist.config.settings import Field


class _Part(NamedTuple):
    """A parameter as a matrix: its elements in the tensor, and the slices of its means and bits in a message."""

    elements: slice
    rows: int
    columns: int
    means: slice
    bits: slice

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows and elements of blocks of the matrix; a block's bits fill whole bytes."""
        if self.rows == 1:
            return ((slice(0, 1), elements) for elements in slices(self.columns))
        chunks = slices(self.rows, max(8, CACHED // self.columns // 8 * 8))
        return ((rows, slice(rows.start * self.columns, rows.stop * self.columns)) for rows in chunks)


@final
class OneBit(Compressor):
    """Send for each element whether it is positive, and two means: of the positive elements, and of the others.

    Bytes for n elements: n/8, and 8 for each parameter, or for each row of its matrix, which holds an output's weights
    (a column in the paper). Error: ‖x‖² − (‖x₊‖₁²/n₊ + ‖x₋‖₁²/n₋) for n₊ positive and n₋ other elements, the smallest
    error of any two values; at most (1 − ‖x‖₁²/(n‖x‖²))‖x‖², so that training converges with error feedback.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "allreduce", compression="onebit")

    Reference: Frank Seide, Hao Fu, Jasha Droppo, Gang Li, Dong Yu, "1-bit stochastic gradient descent and its
    application to data-parallel distributed training of speech DNNs", 2014.
    """

    class Config(Compressor.Config):
        means: Literal["parameter", "row"] = Field(
            "parameter", "one pair of means for each parameter, or for each row of its matrix"
        )

    def __init__(self, config: Config, count: int, spans: Sequence[Span] = ()):
        super().__init__(config, count, spans)
        self._parts: list[_Part] = []
        next_mean = next_byte = 0
        for start, stop, shape in ((s.start, s.stop, s.shape) for s in self.spans if s.stop > s.start):
            rows = shape[0] if config.means == "row" and len(shape) > 1 else 1
            means, bits = slice(next_mean, next_mean + rows), slice(next_byte, next_byte + -(-(stop - start) // 8))
            self._parts.append(_Part(slice(start, stop), rows, (stop - start) // rows, means, bits))
            next_mean, next_byte = means.stop, bits.stop
        self._means, self._bytes = next_mean, next_byte

    def encode_residual_(self, tensor: Tensor) -> Tensor:
        message = np.empty(8 * self._means + self._bytes, np.uint8)
        means, bits = self._open(message)
        for part in self._parts:
            values = tensor[part.elements]
            means[:, part.means] = self._code(part, values, bits[part.bits])
            self._add(part, values.numpy(), means[:, part.means], bits[part.bits], -1.0)
        return torch.from_numpy(message)

    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        means, bits = self._open(message.numpy())
        for part in self._parts:
            self._add(part, out.numpy()[part.elements], means[:, part.means], bits[part.bits], weight)

    def _open(self, message: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return views of a message: the means, shape (2, number), those of positive elements second; and the bits."""
        means, bits = views(message, 2 * self._means)
        return means.reshape(2, -1), bits

    @staticmethod
    def _code(part: _Part, values: Tensor, bits: np.ndarray) -> np.ndarray:
        """Write the bits of one parameter; return its two means per row, shape (2, rows)."""
        with np.errstate(over="ignore"):
            sums, n_positive = _sums(part, values, bits, 1.0)
            scale = 1.0 if np.isfinite(sums).all() else 1.0 / part.columns
            if scale != 1.0:  # the sums have overflowed
                sums, _ = _sums(part, values, bits, scale)
            means = sums / np.maximum([part.columns - n_positive, n_positive], 1) / scale
        return np.clip(means, -MAX_SCALE, MAX_SCALE)

    @staticmethod
    def _add(part: _Part, out: np.ndarray, means: np.ndarray, bits: np.ndarray, weight: float) -> None:
        """Decodes a parameter, and adds `weight` times the result to `out`, its elements."""
        low, high = weight * means.astype(out.dtype)
        with np.errstate(over="ignore"):
            no_overflow = np.isfinite(high - low).all()
        if part.rows == 1:
            table = BITS.astype(out.dtype) * (high - low) + low if no_overflow else np.where(BITS, high, low)
            add_by_bit(bits, out, table)
            return
        for rows, elements in part.blocks():
            packed, shape = bits[elements.start // 8 : -(-elements.stop // 8)], (rows.stop - rows.start, -1)
            below, above = low[rows, None], high[rows, None]
            positive = np.unpackbits(packed, count=elements.stop - elements.start).reshape(shape)
            if no_overflow:
                values = positive.astype(out.dtype)
                values *= above - below
                values += below
            else:  # the means are so far apart that their difference overflows
                values = np.where(positive, above, below)
            out[elements] += values.reshape(-1)


def _sums(part: _Part, values: Tensor, bits: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Write the bits of one parameter; sum its elements by row, and count the positive elements.

    Returns:
        The sums times `scale`, shape (2, rows): of elements that are not positive, and of positive elements, apart, so
        that a large sum can't swallow a small one; and the counts of positive elements, shape (rows,).
    """
    sums, n_positive = np.zeros((2, part.rows)), np.zeros(part.rows)
    longest = max(elements.stop - elements.start for _, elements in part.blocks())
    work = values.new_empty(longest)  # allocated once: page faults of new memory cost as much as a sum
    for rows, elements in part.blocks():
        block = values[elements].view(rows.stop - rows.start, -1)
        positive_part = work[: block.numel()].view_as(block)
        is_positive = block.numpy() > 0
        bits[elements.start // 8 : -(-elements.stop // 8)] = np.packbits(is_positive)
        n_positive[rows] += np.count_nonzero(is_positive) if part.rows == 1 else np.count_nonzero(is_positive, axis=1)
        if scale != 1.0:
            block = block * scale
        torch.clamp(block, min=0, out=positive_part)  # NumPy's maximum takes four times as long
        sums[1, rows] += positive_part.numpy().sum(axis=1)
        sums[0, rows] += torch.sub(block, positive_part, out=positive_part).numpy().sum(axis=1)
    return sums, n_positive
