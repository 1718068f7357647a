"""Sparse messages: some elements of a tensor, with their indices; and the search for large elements.

Indices are sent as entropy-coded gaps. Where each of n elements is in the set with probability d, independently, the
gap to the next one is geometric, and no code needs fewer bits per index than the entropy of that, about
log2(1/d) + 1.44. A gap's high part is coded under this distribution by asymmetric numeral systems, its low bits, which
are as good as uniform, under the uniform one.

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
_MOST_LOW_BITS = 23  # the coder's uniform distribution goes up to 24
_ESCAPE = 127  # stands for every high part from here on; the gap is coded once more, whole
_HEAD = 4  # bytes: the number of indices
_CELLS = 1 << 16  # elements of a sample
_DEVIATIONS = 3  # the sample aims at so many standard deviations too many elements, so that seldom there are too few


# --- messages ---------------------------------------------------------------------------------------------------------
def pack(indices: np.ndarray, count: int, *payload: np.ndarray) -> Tensor:
    """Make one message of ascending indices below `count` and their payload; empty if there are no indices."""
    if not len(indices):
        return torch.empty(0, dtype=torch.uint8)
    parts = [np.array([len(indices)], np.uint32), *payload, encode_indices(indices, count)]
    return torch.from_numpy(np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts]))


def unpack(message: Tensor, count: int, payload: tuple[tuple[type, int], ...]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the indices of a message, and its payload; arrays of no elements where the message is empty.

    Args:
        payload: dtype and number of elements of each array; -1 is one element per index, -8 one per 8 indices.
    """
    if not len(message):
        return np.empty(0, np.int64), [np.empty(0, dtype) for dtype, _ in payload]
    data = message.numpy()
    size, at = int(data[:_HEAD].view(np.uint32)[0]), _HEAD
    arrays = []
    for dtype, number in payload:
        number = -(-size // -number) if number < 0 else number
        n_bytes = number * np.dtype(dtype).itemsize
        arrays.append(data[at : at + n_bytes].copy().view(dtype))
        at += n_bytes
    return decode_indices(data[at:].copy().view(np.uint32), size, count), arrays


def encode_indices(indices: np.ndarray, count: int) -> np.ndarray:
    """Encode ascending indices, each once and below `count` (at most 2^31), as uint32 words."""
    if not len(indices):
        return np.empty(0, np.uint32)
    gaps = np.empty(len(indices), np.int32)
    gaps[0] = indices[0]
    np.subtract(indices[1:], indices[:-1], out=gaps[1:], casting="unsafe")
    gaps[1:] -= 1
    shift, model = _model(len(indices), count)
    high = np.minimum(gaps >> shift, _ESCAPE)
    coder = AnsCoder()  # a stack: what is decoded first is encoded last
    whole = gaps[high == _ESCAPE]
    _push(coder, whole >> 16, 1 << 15)
    _push(coder, whole & 0xFFFF, 1 << 16)
    _push(coder, gaps & ((1 << shift) - 1), 1 << shift)
    coder.encode_reverse(high, model)
    return coder.get_compressed()


def decode_indices(words: np.ndarray, size: int, count: int) -> np.ndarray:
    """Decode the words of `encode_indices` to `size` ascending indices below `count`, int64."""
    if not size:
        return np.empty(0, np.int64)
    shift, model = _model(size, count)
    coder = AnsCoder(words)
    high = coder.decode(model, size)
    gaps = (high << shift) + _pop(coder, size, 1 << shift)
    escaped = np.flatnonzero(high == _ESCAPE)
    low = _pop(coder, len(escaped), 1 << 16)
    gaps[escaped] = (_pop(coder, len(escaped), 1 << 15) << 16) + low
    gaps[1:] += 1
    return np.cumsum(gaps, dtype=np.int64)


def _model(size: int, count: int) -> tuple[int, Categorical]:
    """Return the number of low bits and the distribution of the high part, the same bits on every machine."""
    stay = 1 - size / count  # the probability that an element is not in the set
    shift = min(max(0, int(count / (size * _HIGH_MEAN)).bit_length() - 1), _MOST_LOW_BITS)
    for _ in range(shift):  # products and quotients only: a library's power may differ in the last bit
        stay *= stay
    tail = np.cumprod(np.full(_ESCAPE + 1, stay))
    tail[1:], tail[0] = tail[:-1], 1.0
    tail[:-1] *= 1 - stay
    return shift, Categorical(tail, perfect=False)


def _push(coder: AnsCoder, symbols: np.ndarray, limit: int) -> None:
    if limit > 1 and len(symbols):
        coder.encode_reverse(symbols, Uniform(limit))


def _pop(coder: AnsCoder, size: int, limit: int) -> np.ndarray:
    return coder.decode(Uniform(limit), size) if limit > 1 and size else np.zeros(size, np.int32)


# --- the search for large elements ------------------------------------------------------------------------------------
def above(values: np.ndarray, bound: float | np.floating) -> np.ndarray:
    """Find the indices of the elements greater than `bound` in magnitude, ascending, int64."""
    size = max(1, min(CACHED, len(values)))
    magnitude, exceeds = np.empty(size, values.dtype), np.empty(size, bool)
    parts = []
    for place in slices(len(values), size):
        length = place.stop - place.start
        np.abs(values[place], out=magnitude[:length])
        np.greater(magnitude[:length], bound, out=exceeds[:length])
        parts.append(np.flatnonzero(exceeds[:length]) + place.start)
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


class Sample:
    """Finds the largest elements of a vector with the help of a random sample, a new one each time.

    The vector is divided into at least 2^16 equal cells, and one element of each is drawn at random, so that the sample
    has all rows and columns of a matrix in it. A sample of m elements gives a relative error of about 1/√(m · part). A
    vector of fewer than 2^17 elements is its own sample.
    """

    def __init__(self, count: int):
        self._stride = max(1, count // _CELLS)
        self._starts = np.arange(0, count - self._stride + 1, self._stride)
        self.drawn = 0  # samples so far

    def bound(self, values: np.ndarray, part: float) -> float:
        """Estimate the bound that about `part` of the magnitudes exceed; 0 if all may."""
        sample = np.abs(values if self._stride == 1 else values[self._positions()])
        place = len(sample) - max(1, round(part * len(sample))) - 1
        return float(np.partition(sample, place)[place]) if place >= 0 else 0.0

    def largest(self, values: np.ndarray, size: int) -> np.ndarray:
        """Find the indices of the `size` largest magnitudes, ascending; of equal ones the first, and no zeros."""
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
        least = np.partition(magnitude, len(indices) - size)[len(indices) - size]
        kept = magnitude > least
        kept[np.flatnonzero(magnitude == least)[: size - np.count_nonzero(kept)]] = True
        return indices[kept]

    def _positions(self) -> np.ndarray:
        self.drawn += 1
        return self._starts + np.random.default_rng(self.drawn).integers(self._stride, size=len(self._starts))
