"""1-bit: the sign of every element, and the means of the positive and of the other ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, final

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from hpcdist.compress.base import Compressor
from hpcdist.compress.chunks import CHUNK, chunks

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)  # of each byte, as numbers


class _Part(NamedTuple):
    """A parameter as a matrix: its elements, and where its means and its bits lie in a message."""

    elements: slice
    rows: int
    columns: int
    means: slice
    bits: slice

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Rows and elements of pieces that fill whole bytes."""
        if self.rows == 1:
            return ((slice(0, 1), found) for found in chunks(self.columns))
        rows = chunks(self.rows, max(8, CHUNK // self.columns // 8 * 8))
        return ((found, slice(found.start * self.columns, found.stop * self.columns)) for found in rows)


@final
class OneBit(Compressor):
    """Sends a bit per element, whether it is positive; it stands for the mean of those that are, or of the others.

    Bytes for n elements: n/8, and 8 for each parameter, or for each row of its matrix: of an output's weights, which
    are a column in the paper. Error: ‖x‖² − (‖x₊‖₁²/n₊ + ‖x₋‖₁²/n₋) for n₊ positive and n₋ other elements, which is the
    least that two values can leave; at most (1 − ‖x‖₁²/(n‖x‖²))‖x‖², so that error feedback converges.

    Reference: Frank Seide, Hao Fu, Jasha Droppo, Gang Li, Dong Yu, "1-bit stochastic gradient descent and its
    application to data-parallel distributed training of speech DNNs", 2014.
    """

    class Config(Compressor.Config):
        """Options of onebit."""

        means: Literal["parameter", "row"] = Field(
            "parameter", description="what has two means of its own: a parameter, or each row of its matrix"
        )

    def __init__(self, config: Config, count, spans=()):
        super().__init__(config, count, spans)
        self._parts: list[_Part] = []
        mean = byte = 0
        for start, stop, shape in ((s.start, s.stop, s.shape) for s in self.spans if s.stop > s.start):
            rows = shape[0] if config.means == "row" and len(shape) > 1 else 1
            means, bits = slice(mean, mean + rows), slice(byte, byte + -(-(stop - start) // 8))
            self._parts.append(_Part(slice(start, stop), rows, (stop - start) // rows, means, bits))
            mean, byte = means.stop, bits.stop
        self._means, self._bytes = mean, byte

    def take(self, tensor: Tensor) -> Tensor:
        message = np.empty(8 * self._means + self._bytes, np.uint8)
        means, bits = self._open(message)
        for part in self._parts:
            values = tensor.numpy()[part.elements]
            means[:, part.means] = self._code(part, values, bits[part.bits])
            self._add(part, values, means[:, part.means], bits[part.bits], -1.0)
        return torch.from_numpy(message)

    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        means, bits = self._open(message.numpy())
        for part in self._parts:
            self._add(part, out.numpy()[part.elements], means[:, part.means], bits[part.bits], weight)

    def _open(self, message: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Views: the means, of shape (2, means), those of the positive elements second; and the bits."""
        head = 8 * self._means
        return message[:head].view(np.float32).reshape(2, -1), message[head:]

    @staticmethod
    def _code(part: _Part, values: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """Writes the bits; returns the means. Sums are of one sign only, so that none is lost beside the other."""
        sums, number = np.zeros((2, part.rows)), np.zeros(part.rows)
        for rows, found in part.blocks():
            block = values[found].reshape(rows.stop - rows.start, -1)
            positive = block > 0
            bits[found.start // 8 : -(-found.stop // 8)] = np.packbits(positive)
            number[rows] += np.count_nonzero(positive, axis=1)
            kept = np.maximum(block, 0)
            sums[1, rows] += kept.sum(axis=1)
            sums[0, rows] += np.subtract(block, kept, out=kept).sum(axis=1)
        return sums / np.maximum([part.columns - number, number], 1)

    @staticmethod
    def _add(part: _Part, out: np.ndarray, means: np.ndarray, bits: np.ndarray, weight: float) -> None:
        low, high = weight * means.astype(out.dtype)[..., None]
        table = _BITS.astype(out.dtype)
        for rows, found in part.blocks():
            packed = bits[found.start // 8 : -(-found.stop // 8)]
            values = np.empty((len(packed), 8), out.dtype)
            np.take(table, packed, axis=0, out=values, mode="clip")  # "raise" would go through a buffer
            values = values.reshape(-1)[: found.stop - found.start].reshape(rows.stop - rows.start, -1)
            values *= high[rows] - low[rows]
            values += low[rows]
            out[found] += values.reshape(-1)
