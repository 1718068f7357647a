"""Look at flat tensors a piece at a time: torch converts all that it is given to a wider type before it adds up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

PIECE = 1 << 20  # elements


def pieces(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield parts of at most 2^20 elements, as flat tensors; views, where the tensors are contiguous."""
    for tensor in tensors:
        yield from tensor.reshape(-1).split(PIECE)


def sums(tensors: Iterable[Tensor]) -> list[str]:
    """Add up each piece in double precision; as text, for a NaN is equal to itself there."""
    return [repr(piece.sum(dtype=torch.float64).item()) for piece in pieces(tensors)]
