"""Few bits per value: bins around the mean, as wide as a part of the standard deviation, each sent as its mean."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from hpcdist.comm.chunks import CACHED, slices
from hpcdist.compress.coding.elements import MOST_SCALE
from hpcdist.compress.coding.sparse import AnsCoder, Categorical

RANGE = 6.0  # standard deviations that the bins span


def quantise(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Put values into `count` bins; return the bin of each, and the bins' means as float32, 0 of an empty one.

    Bin k of B is centred at μ + (k − B/2)w, with w = 6σ/B, where μ and σ are mean and standard deviation of the values;
    what lies outside goes to the first or last one. So the mean of the values is kept. No more than B values have a bin
    each, for the two of a pair would share one.

    Args:
        values: float32 or float64, finite.
    """
    largest = max(float(values.max()), -float(values.min())) if len(values) else 0.0
    if not largest:
        return np.zeros(len(values), np.int32), np.zeros(count, np.float32)
    if len(values) <= count:
        means = np.zeros(count)
        means[: len(values)] = values
        return np.arange(len(values), dtype=np.int32), np.clip(means, -MOST_SCALE, MOST_SCALE).astype(np.float32)
    mean = sum(parts.sum() for _, parts in _fractions(values, largest)) / len(values)
    squares = sum(np.square(parts - mean).sum() for _, parts in _fractions(values, largest))
    deviation = math.sqrt(squares / (len(values) - 1))
    by = count / (RANGE * deviation) if deviation > 0 else 1.0
    codes, held, sums = np.empty(len(values), np.int32), np.zeros(count, np.int64), np.zeros(count)
    for chunk, parts in _fractions(values, largest):
        places = (parts - mean) * by + count / 2
        codes[chunk] = np.rint(places, out=places).clip(0, count - 1, out=places)
        held += np.bincount(codes[chunk], minlength=count)
        sums += np.bincount(codes[chunk], weights=parts, minlength=count)
    means = np.divide(sums, held, out=np.zeros(count), where=held > 0) * largest
    return codes, np.clip(means, -MOST_SCALE, MOST_SCALE).astype(np.float32)


def _fractions(values: np.ndarray, largest: float) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield pieces, and their values as float64 fractions of the largest magnitude, of which the squares are finite."""
    work = np.empty(min(CACHED, len(values)))
    for chunk in slices(len(values)):
        yield chunk, np.divide(values[chunk], largest, out=work[: chunk.stop - chunk.start], dtype=np.float64)


def encode_codes(codes: np.ndarray, count: int) -> np.ndarray:
    """Encode the bins of values as bytes: how many have each of the `count` bins, then their entropy code."""
    held = np.bincount(codes, minlength=count).astype(np.uint32)
    coder = AnsCoder()
    if np.count_nonzero(held) > 1:
        coder.encode_reverse(codes, _model(held))
    return np.concatenate([held, coder.get_compressed()]).view(np.uint8)


def decode_codes(data: np.ndarray, count: int) -> np.ndarray:
    """Decode the bytes of `encode_codes`; int32."""
    words = data.view(np.uint32)
    held, size = words[:count], int(words[:count].sum())
    if np.count_nonzero(held) <= 1:
        return np.full(size, held.argmax() if size else 0, np.int32)
    return AnsCoder(words[count:].copy()).decode(_model(held), size)


def _model(held: np.ndarray) -> Categorical:
    return Categorical(held / held.sum(), perfect=False)
