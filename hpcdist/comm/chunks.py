"""Process flat tensors in chunks: intermediate results stay in the cache, and conversions need no full-size copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

CHUNK = 1 << 20  # elements
CACHED = 1 << 18  # elements; chunks of a few tensors fit a core's caches, and shorter ones cost more calls


def chunks(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield flat chunks of at most 2^20 elements; views if the tensors are contiguous."""
    for tensor in tensors:
        yield from tensor.reshape(-1).split(CHUNK)


def slices(count: int, size: int = CACHED) -> Iterator[slice]:
    """Split the range 0..count into slices of `size` elements; the last one may be shorter."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def alongside(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield matching chunks of flat tensors of equal length, so that several operations read memory only once.

    Device tensors are not split, nor are short ones, for which a split would take longer than an addition.
    """
    if tensors[0].numel() > CACHED and all(tensor.is_cpu for tensor in tensors):
        yield from zip(*(tensor.split(CACHED) for tensor in tensors), strict=True)
    else:
        yield tensors


def sums(tensors: Iterable[Tensor]) -> list[str]:
    """Return the sum of each chunk in double precision, as text: so that a NaN equals a NaN."""
    return [repr(chunk.sum(dtype=torch.float64).item()) for chunk in chunks(map(as_real, tensors))]


def sum_and_norm(tensor: Tensor) -> tuple[float, float]:
    """Return the sum and the 2-norm of a flat tensor, in double precision. Waits for the device.

    For complex numbers the sum adds real and imaginary parts.
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
    """View a complex tensor as pairs of real numbers; return a real tensor unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
