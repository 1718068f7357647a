"""Look at flat tensors a piece at a time: torch converts all that it is given to a wider type before it adds up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

PIECE = 1 << 20  # elements
CACHED = 1 << 18  # elements of a few tensors that a core's caches hold


def pieces(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield parts of at most 2^20 elements, as flat tensors; views, where the tensors are contiguous."""
    for tensor in tensors:
        yield from tensor.reshape(-1).split(PIECE)


def alongside(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same part of flat tensors of one length, so that several operations on it read memory once.

    The whole where they are on a device.
    """
    if all(tensor.is_cpu for tensor in tensors):
        yield from zip(*(tensor.split(CACHED) for tensor in tensors), strict=True)
    else:
        yield tensors


def sums(tensors: Iterable[Tensor]) -> list[str]:
    """Add up each piece in double precision; as text, for a NaN is equal to itself there."""
    return [repr(piece.sum(dtype=torch.float64).item()) for piece in pieces(map(as_real, tensors))]


def sum_and_norm(tensor: Tensor) -> tuple[float, float]:
    """Return the sum and the 2-norm of a flat tensor, in double precision; the sum of complex numbers is of both parts.

    Waits for the device.
    """
    total = squares = 0.0
    for piece in pieces([as_real(tensor)]):
        total += piece.sum(dtype=torch.float64).item()
        squares += piece.double().square().sum().item()
    return total, squares**0.5


def some_values(tensor: Tensor) -> bytes:
    """Return up to 256 values of a flat tensor of real numbers, evenly spaced, as bytes. Waits for the device."""
    return tensor[:: max(1, tensor.numel() // 256)].to("cpu", torch.float64).numpy().tobytes()


def as_real(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones; others as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
