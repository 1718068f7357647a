"""Quantise values to few bits: bins around the mean, with a width relative to the standard deviation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from hpcdist.comm.chunks import CACHED, slices
from hpcdist.compress.coding.elements import MAX_SCALE
from hpcdist.compress.coding.sparse import AnsCoder, Categorical

RANGE = 6.0  # standard deviations that the bins span


def quantise(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign values to `count` bins; return each value's bin, and the bins' means as float32, 0 for an empty bin.

    Bin k of B is centred at μ + (k − B/2)w, with w = 6σ/B, where μ and σ are mean and standard deviation of the values;
    values outside go to the first or last bin. The mean of the values is kept. At most B values get a bin each.

    Args:
        values: float32 or float64, finite.
    """
    largest = max(float(values.max()), -float(values.min())) if len(values) else 0.0
    if not largest:
        return np.zeros(len(values), np.int32), np.zeros(count, np.float32)
    if len(values) <= count:
        means = np.zeros(count)
        means[: len(values)] = values
        return np.arange(len(values), dtype=np.int32), np.clip(means, -MAX_SCALE, MAX_SCALE).astype(np.float32)
    mean = sum(fractions.sum() for _, fractions in _fractions(values, largest)) / len(values)
    squares = sum(np.square(fractions - mean).sum() for _, fractions in _fractions(values, largest))
    deviation = math.sqrt(squares / (len(values) - 1))
    bins_per_unit = count / (RANGE * deviation) if deviation > 0 else 1.0
    codes, histogram, sums = np.empty(len(values), np.int32), np.zeros(count, np.int64), np.zeros(count)
    for chunk, fractions in _fractions(values, largest):
        positions = (fractions - mean) * bins_per_unit + count / 2
        codes[chunk] = np.rint(positions, out=positions).clip(0, count - 1, out=positions)
        histogram += np.bincount(codes[chunk], minlength=count)
        sums += np.bincount(codes[chunk], weights=fractions, minlength=count)
    means = np.divide(sums, histogram, out=np.zeros(count), where=histogram > 0) * largest
    return codes, np.clip(means, -MAX_SCALE, MAX_SCALE).astype(np.float32)


def _fractions(values: np.ndarray, largest: float) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield slices, and their values as float64 fractions of the largest magnitude, so that squares are finite."""
    work = np.empty(min(CACHED, len(values)))
    for chunk in slices(len(values)):
        yield chunk, np.divide(values[chunk], largest, out=work[: chunk.stop - chunk.start], dtype=np.float64)


def encode_parts(values: np.ndarray, parts: Sequence[slice], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantise each part of `values`, and overwrite it with the error; return the coded bins, and the parts' means."""
    codes, means = np.empty(len(values), np.int32), np.empty((len(parts), count), np.float32)
    for part, part_means in zip(parts, means, strict=True):
        codes[part], part_means[:] = quantise(values[part], count)
        values[part] -= part_means.astype(values.dtype)[codes[part]]
    return encode_codes(codes, count), means.reshape(-1)


def add_parts(coded: np.ndarray, means: np.ndarray, parts: Sequence[slice], out: np.ndarray, weight: float) -> None:
    """Decode the result of `encode_parts`, and add `weight` times the values to `out`."""
    table = means.reshape(len(parts), -1).astype(out.dtype)
    codes = decode_codes(coded, table.shape[1])
    for part, part_means in zip(parts, table, strict=True):
        out[part] += weight * part_means[codes[part]]


def encode_codes(codes: np.ndarray, count: int) -> np.ndarray:
    """Encode values' bins as bytes: the histogram of the `count` bins, then the entropy code."""
    histogram = np.bincount(codes, minlength=count).astype(np.uint32)
    coder = AnsCoder()
    if np.count_nonzero(histogram) > 1:
        coder.encode_reverse(codes, _model(histogram))
    return np.concatenate([histogram, coder.get_compressed()]).view(np.uint8)


def decode_codes(data: np.ndarray, count: int) -> np.ndarray:
    """Decode the bytes of `encode_codes` to bins, int32."""
    data_words = data.view(np.uint32)
    histogram, size = data_words[:count], int(data_words[:count].sum())
    if np.count_nonzero(histogram) <= 1:
        return np.full(size, histogram.argmax() if size else 0, np.int32)
    return AnsCoder(data_words[count:].copy()).decode(_model(histogram), size)


def _model(histogram: np.ndarray) -> Categorical:
    return Categorical(histogram / histogram.sum(), perfect=False)
