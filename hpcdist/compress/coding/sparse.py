"""Sparse messages: some elements of a tensor, with their indices; and the search for large elements.

Indices are sent as entropy-coded gaps. If each element is chosen with probability d, independently, a gap has a
geometric distribution, whose entropy, about log2(1/d) + 1.44 bits, is the least number of bits per index. A gap's high
part is coded under this distribution by asymmetric numeral systems (ANS); its low bits, which are nearly uniform, under
the uniform distribution.

Reference: Jarek Duda, "Asymmetric numeral systems: entropy coding combining speed of Huffman coding with compression
rate of arithmetic coding", 2013; Robert Bamler, "Understanding entropy coding with asymmetric numeral systems", 2022.
"""

from __future__ import annotations

from math import sqrt
from typing import TypeAlias

import constriction
import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.chunks import CACHED, slices

AnsCoder: TypeAlias = constriction.stream.stack.AnsCoder
Categorical: TypeAlias = constriction.stream.model.Categorical
Uniform = constriction.stream.model.Uniform

_HIGH_MEAN = 4  # the high part's mean is 4 to 8
_MAX_LOW_BITS = 23  # the coder's uniform distribution goes up to 24
_ESCAPE = 127  # represents all larger high parts; the whole gap is coded once more
_HEAD = 4  # bytes: the number of indices
_CELLS = 1 << 16  # elements of a sample
_DEVIATIONS = 3  # standard deviations by which the sample aims at too many elements, so that it seldom finds too few


# --- messages ---------------------------------------------------------------------------------------------------------
def pack(indices: np.ndarray, count: int, *payload: np.ndarray) -> Tensor:
    """Encode the elements at ascending `indices` of a tensor of `count` elements as a message; empty without indices.

    The message, uint8: the number of indices (uint32), the payload's arrays (values of these elements, say) one after
    another, the coded indices. The receiver, which knows `count`, decodes it by `unpack`: change both or none.
    """
    if not len(indices):
        return torch.empty(0, dtype=torch.uint8)
    parts = [np.array([len(indices)], np.uint32), *payload, encode_indices(indices, count)]
    return torch.from_numpy(np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts]))


def unpack(message: Tensor, count: int, payload: tuple[tuple[type, int], ...]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Decode the result of `pack`: return the indices and the payload; empty arrays for an empty message.

    `payload`: dtype and number of elements of each array; -1: one element per index, -8: one per 8 indices.
    """
    if not len(message):
        return np.empty(0, np.int64), [np.empty(0, dtype) for dtype, _ in payload]
    data = message.numpy()
    size, offset = int(data[:_HEAD].view(np.uint32)[0]), _HEAD
    arrays = []
    for dtype, number in payload:
        number = -(-size // -number) if number < 0 else number
        n_bytes = number * np.dtype(dtype).itemsize
        arrays.append(data[offset : offset + n_bytes].copy().view(dtype))
        offset += n_bytes
    return decode_indices(data[offset:].copy().view(np.uint32), size, count), arrays


def encode_indices(indices: np.ndarray, count: int) -> np.ndarray:
    """Encode distinct ascending indices below `count` (at most 2^31) as a uint32 array."""
    if not len(indices):
        return np.empty(0, np.uint32)
    gaps = np.empty(len(indices), np.int32)
    gaps[0] = indices[0]
    np.subtract(indices[1:], indices[:-1], out=gaps[1:], casting="unsafe")
    gaps[1:] -= 1
    shift, model = _model(len(indices), count)
    high = np.minimum(gaps >> shift, _ESCAPE)
    coder = AnsCoder()  # a stack: what is decoded first is encoded last
    escaped_gaps = gaps[high == _ESCAPE]
    _push(coder, escaped_gaps >> 16, 1 << 15)
    _push(coder, escaped_gaps & 0xFFFF, 1 << 16)
    _push(coder, gaps & ((1 << shift) - 1), 1 << shift)
    coder.encode_reverse(high, model)
    return coder.get_compressed()


def decode_indices(encoded: np.ndarray, size: int, count: int) -> np.ndarray:
    """Decode the result of `encode_indices` to `size` ascending indices below `count`, int64."""
    if not size:
        return np.empty(0, np.int64)
    shift, model = _model(size, count)
    coder = AnsCoder(encoded)
    high = coder.decode(model, size)
    gaps = (high << shift) + _pop(coder, size, 1 << shift)
    escaped = np.flatnonzero(high == _ESCAPE)
    low = _pop(coder, len(escaped), 1 << 16)
    gaps[escaped] = (_pop(coder, len(escaped), 1 << 15) << 16) + low
    gaps[1:] += 1
    return np.cumsum(gaps, dtype=np.int64)


def _model(size: int, count: int) -> tuple[int, Categorical]:
    """Return the number of a gap's low bits, and the distribution of its high part, identical on all machines."""
    stay = 1 - size / count  # the probability that an element is not in the set
    shift = min(max(0, int(count / (size * _HIGH_MEAN)).bit_length() - 1), _MAX_LOW_BITS)
    for _ in range(shift):  # products and quotients only: a library's power may differ in the last bit
        stay *= stay
    # First P(high >= k), then P(high = k), except for the last entry, of the escape.
    probabilities = np.cumprod(np.full(_ESCAPE + 1, stay))
    probabilities[1:], probabilities[0] = probabilities[:-1], 1.0
    probabilities[:-1] *= 1 - stay
    return shift, Categorical(probabilities, perfect=False)


def _push(coder: AnsCoder, symbols: np.ndarray, limit: int) -> None:
    if limit > 1 and len(symbols):
        coder.encode_reverse(symbols, Uniform(limit))


def _pop(coder: AnsCoder, size: int, limit: int) -> np.ndarray:
    return coder.decode(Uniform(limit), size) if limit > 1 and size else np.zeros(size, np.int32)


# --- the search for large elements ------------------------------------------------------------------------------------
def above(values: np.ndarray, bound: float | np.floating) -> np.ndarray:
    """Return the ascending indices, int64, of the elements greater than `bound` in magnitude."""
    size = max(1, min(CACHED, len(values)))
    magnitude, exceeds = np.empty(size, values.dtype), np.empty(size, bool)
    parts = []
    for chunk in slices(len(values), size):
        length = chunk.stop - chunk.start
        np.abs(values[chunk], out=magnitude[:length])
        np.greater(magnitude[:length], bound, out=exceeds[:length])
        parts.append(np.flatnonzero(exceeds[:length]) + chunk.start)
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


class Sample:
    """Finds the largest elements of a vector, by a threshold estimated from a random sample.

    The vector is divided into at least 2^16 equal strata; one random element of each is sampled, so that all rows and
    columns of a matrix take part. A sample of m elements estimates the threshold for a fraction `part` with a relative
    error of about 1/√(m · part). A vector of fewer than 2^17 elements is used whole.
    """

    def __init__(self, count: int):
        self._stride = max(1, count // _CELLS)
        self._starts = np.arange(0, count - self._stride + 1, self._stride)
        self.drawn = 0  # number of samples so far

    def bound(self, values: np.ndarray, part: float) -> float:
        """Estimate the bound that a fraction `part` of the magnitudes exceeds; 0 if nearly all do."""
        sample = np.abs(values if self._stride == 1 else values[self._positions()])
        index = len(sample) - max(1, round(part * len(sample))) - 1
        return float(np.partition(sample, index)[index]) if index >= 0 else 0.0

    def largest(self, values: np.ndarray, size: int) -> np.ndarray:
        """Return the ascending indices of the `size` largest magnitudes; the first of equal ones, without zeros."""
        part = size / len(values)
        if self._stride > 1:
            part *= 1 + _DEVIATIONS / sqrt(size / self._stride)
        bound = self.bound(values, part)
        indices = above(values, bound)
        while len(indices) < size and bound > 0:  # an unlucky sample, or many elements as large as the bound
            part *= 4
            bound = self.bound(values, part)
            indices = above(values, bound)
        if len(indices) <= size:
            return indices
        magnitude = np.abs(values[indices])
        smallest = np.partition(magnitude, len(indices) - size)[len(indices) - size]
        kept = magnitude > smallest
        kept[np.flatnonzero(magnitude == smallest)[: size - np.count_nonzero(kept)]] = True
        return indices[kept]

    def _positions(self) -> np.ndarray:
        self.drawn += 1
        return self._starts + np.random.default_rng(self.drawn).integers(self._stride, size=len(self._starts))
