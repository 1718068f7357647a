"""Means of magnitudes that are finite where the elements are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hpcdist.compress.coding.pieces import CHUNK

_LEAST = {torch.float32: 1e-17, torch.float64: 1e-140}  # below them squares lose bits


def mean(values: Tensor, order: int = 1) -> float:
    """Compute the power mean of magnitudes, (Σ|x|^order / n)^(1/order), also where powers overflow or vanish.

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
    parts = [torch.linalg.vector_norm(part, order).item() for part in values.split(CHUNK)]
    return sum(parts) if order == 1 else math.sqrt(sum(part * part for part in parts))
