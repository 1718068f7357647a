"""Arithmetic on the elements of long tensors: messages of scales and bits, values selected by bits, norms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.chunks import CACHED, alongside, slices

BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)  # the bits of each byte, as numbers
MIN_SCALE = 1e-30  # smaller scales are sent as 0: their inverse may be infinite, or fractions lose bits
MAX_SCALE = float(np.finfo(np.float32).max)
FLOATS: dict[str, type[np.floating]] = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}
_SIGNS = {dtype: torch.from_numpy(2.0 * BITS - 1).to(dtype).numpy() for dtype in (torch.float32, torch.float64)}
_MIN_NORM = {torch.float32: 1e-17, torch.float64: 1e-140}  # squares of smaller numbers lose bits


def views(message: np.ndarray, numbers: int) -> tuple[np.ndarray, np.ndarray]:
    """View a message as its first `numbers` float32 values and the remaining bytes."""
    return message[: 4 * numbers].view(np.float32), message[4 * numbers :]


def add_signs(bits: np.ndarray, out: Tensor, steps: Sequence[float], spans: Sequence[slice]) -> None:
    """Add its span's step to each element whose bit is 1, and subtract it from the others.

    Args:
        bits: packed as by NumPy's packbits, uint8, one bit per element of `out`.
        out: float32 or float64, on the host. Overwritten.
        steps: one per span; spans are ascending.
    """
    table, index, count = _SIGNS[out.dtype], 0, out.numel()
    work = np.empty((-(-min(CACHED, count) // 8), 8), table.dtype)
    signs = torch.from_numpy(work).view(-1)
    for chunk in slices(count):
        packed = bits[chunk.start // 8 : -(-chunk.stop // 8)]
        np.take(table, packed, axis=0, out=work[: len(packed)], mode="clip")  # "raise" would go through a buffer
        while index < len(spans) and spans[index].start < chunk.stop:
            start, stop = max(spans[index].start, chunk.start), min(spans[index].stop, chunk.stop)
            out[start:stop].add_(signs[start - chunk.start : stop - chunk.start], alpha=steps[index])
            if spans[index].stop > chunk.stop:  # the span continues in the next chunk
                break
            index += 1


def add_by_bit(bits: np.ndarray, out: np.ndarray, table: np.ndarray) -> None:
    """Add the values that each byte represents to the elements of `out`.

    Args:
        bits: uint8; each byte encodes as many elements as a row of the table has: 8 as by NumPy's packbits, or fewer.
        table: the values of each byte's elements, shape (256, elements per byte).
    """
    table, of_byte = table.astype(out.dtype), table.shape[1]
    # One array for all chunks: page faults of new memory would take as long as the sum.
    work = np.empty((-(-min(CACHED, len(out)) // of_byte), of_byte), out.dtype)
    for chunk in slices(len(out)):  # chunks start at whole bytes
        packed, part = bits[chunk.start // of_byte : -(-chunk.stop // of_byte)], out[chunk]
        values = work[: len(packed)]
        np.take(table, packed, axis=0, out=values, mode="clip")  # "raise" would go through a buffer
        part += values.reshape(-1)[: len(part)]


def largest(values: Tensor) -> float:
    """Return the largest magnitude, or 0 for an empty tensor."""
    if not len(values):
        return 0.0
    low, high = (value.item() for value in torch.aminmax(values))
    return max(-low, high)


def as_scale(magnitude: float) -> float:
    """Limit a magnitude to the range of scales, which are sent as float32; return 0 below `MIN_SCALE`."""
    return min(magnitude, MAX_SCALE) if magnitude >= MIN_SCALE else 0.0


def as_sent(values: np.ndarray, dtype: type[np.floating]) -> np.ndarray:
    """Round values to the dtype of a message; values beyond its range become its largest number."""
    limit = np.finfo(dtype).max
    return np.clip(values, -limit, limit).astype(dtype)


def mean(values: Tensor, order: int = 1) -> float:
    """Compute the power mean of magnitudes, (Σ|x|^order / n)^(1/order), even if powers overflow or vanish.

    Args:
        values: float32 or float64, any shape; the result has the precision of sums in the same dtype.
        order: 1 (mean magnitude) or 2 (root mean square).
    """
    count = values.numel()
    if not count:
        return 0.0
    total = _norm(values, order)
    if _MIN_NORM[values.dtype] < total < math.inf:
        return total / count ** (1 / order)
    scale = values.abs().max().item()
    return min(1.0, _norm(values.double() / scale, order) / count ** (1 / order)) * scale if scale else 0.0


def _norm(values: Tensor, order: int) -> float:
    """Compute a norm by chunks, which is faster than in float64 and almost as exact."""
    if order == 1:  # a fifth of the time that torch takes for this norm
        return sum(part.abs().sum().item() for (part,) in alongside(values))
    return math.sqrt(sum(torch.linalg.vector_norm(part, order).item() ** 2 for (part,) in alongside(values)))
