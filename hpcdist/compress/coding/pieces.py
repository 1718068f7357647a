"""Large tensors piece by piece, so that intermediate results stay in the cache; means of their magnitudes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

PIECE = 1 << 18  # elements; smaller pieces take longer, as each one costs some calls
_LEAST = {torch.float32: 1e-17, torch.float64: 1e-140}  # squares of smaller numbers lose bits


def slices(count: int, size: int = PIECE) -> Iterator[slice]:
    """Cut the range 0..count into slices of `size` elements; the last slice may be shorter."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def mean(values: Tensor, order: int = 1) -> float:
    """Compute the power mean of magnitudes, (Σ|x|^order / n)^(1/order), even if powers overflow or vanish.

    Args:
        values: float32 or float64, of any shape; the result is as exact as sums in that type.
        order: 1 (mean magnitude) or 2 (root mean square).
    """
    count = values.numel()
    if not count:
        return 0.0
    total = _norm(values, order)
    if _LEAST[values.dtype] < total < math.inf:
        return total / count ** (1 / order)
    scale = values.abs().max().item()
    return min(1.0, _norm(values.double() / scale, order) / count ** (1 / order)) * scale if scale else 0.0


def _norm(values: Tensor, order: int) -> float:
    """Compute a norm piece by piece, which is faster than in float64 and almost as exact."""
    parts = [torch.linalg.vector_norm(part, order).item() for part in values.split(PIECE)]
    return sum(parts) if order == 1 else math.sqrt(sum(part * part for part in parts))
