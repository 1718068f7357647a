"""Sparse messages: some elements of a tensor by their indices; and finding the elements above a bound."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hpcdist.compress.coding import indices as coding
from hpcdist.compress.coding.pieces import CHUNK, chunks

_HEAD = 4  # bytes: the number of indices


def above(values: np.ndarray, bound: float) -> np.ndarray:
    """Find the indices of the elements greater than `bound` in magnitude, ascending, int64."""
    size = max(1, min(CHUNK, len(values)))
    magnitude, exceeds = np.empty(size, values.dtype), np.empty(size, bool)
    parts = []
    for place in chunks(len(values), size):
        length = place.stop - place.start
        np.abs(values[place], out=magnitude[:length])
        np.greater(magnitude[:length], bound, out=exceeds[:length])
        parts.append(np.flatnonzero(exceeds[:length]) + place.start)
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def pack(indices: np.ndarray, count: int, *payload: np.ndarray) -> Tensor:
    """Make one message of ascending indices below `count` and their payload; empty where there are no indices."""
    if not len(indices):
        return torch.empty(0, dtype=torch.uint8)
    parts = [np.array([len(indices)], np.uint32), *payload, coding.encode(indices, count)]
    return torch.from_numpy(np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts]))


def unpack(message: Tensor, count: int, payload: tuple[tuple[type, int], ...]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the indices of a message that is not empty, and its payload.

    Args:
        payload: dtype and number of elements of each array; a number of -1 is one per index, -8 one per 8 of them.
    """
    data = message.numpy()
    size, at = int(data[:_HEAD].view(np.uint32)[0]), _HEAD
    arrays = []
    for dtype, number in payload:
        number = -(-size // -number) if number < 0 else number
        n_bytes = number * np.dtype(dtype).itemsize
        arrays.append(data[at : at + n_bytes].copy().view(dtype))
        at += n_bytes
    return coding.decode(data[at:].copy().view(np.uint32), size, count), arrays
