"""Flat tensors piece by piece: results between stay in the caches, and no whole tensor is converted to a wider type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

PIECE = 1 << 20  # elements
CACHED = 1 << 18  # elements; pieces of a few tensors fit into a core's caches, and shorter ones cost more calls


def chunks(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield flat parts of at most 2^20 elements; views if the tensors are contiguous."""
    for tensor in tensors:
        yield from tensor.reshape(-1).split(PIECE)


def slices(count: int, size: int = CACHED) -> Iterator[slice]:
    """Cut the range 0..count into slices of `size` elements; the last slice may be shorter."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def alongside(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield matching parts of flat tensors of one length, so that several operations read memory once.

    On a device yield the whole tensors.
    """
    if all(tensor.is_cpu for tensor in tensors):
        yield from zip(*(tensor.split(CACHED) for tensor in tensors), strict=True)
    else:
        yield tensors


def sums(tensors: Iterable[Tensor]) -> list[str]:
    """Sum each piece in double precision; as text, in which a NaN equals itself."""
    return [repr(chunk.sum(dtype=torch.float64).item()) for chunk in chunks(map(as_real, tensors))]


def sum_and_norm(tensor: Tensor) -> tuple[float, float]:
    """Return the sum and the 2-norm of a flat tensor, in double precision. Waits for the device.

    The sum of complex numbers is that of their real and imaginary parts together.
    """
    total = squares = 0.0
    for chunk in chunks([as_real(tensor)]):
        total += chunk.sum(dtype=torch.float64).item()
        squares += chunk.double().square().sum().item()
    return total, squares**0.5


def some_values(tensor: Tensor) -> bytes:
    """Return up to 256 evenly spaced values of a tensor, as bytes. Waits for the device."""
    tensor = as_real(tensor).reshape(-1)
    return tensor[:: max(1, tensor.numel() // 256)].to("cpu", torch.float64).numpy().tobytes()


def as_real(tensor: Tensor) -> Tensor:
    """View complex numbers as pairs of real ones; return real ones as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
