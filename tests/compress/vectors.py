"""What the tests of compressors share: compressors with options, random tensors, parameters in them."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcdist.compress import Compressor, Span, load


def make(name: str, count: int, spans=(), stream: int = 0, **options) -> Compressor:
    cls = load(name)
    compressor = cls(cls.Config(**options), count, spans)
    compressor.stream = stream
    return compressor


def normal(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def spans_of(*shapes: tuple[int, ...]) -> list[Span]:
    """Parameters of these shapes, one after the other."""
    found, at = [], 0
    for shape in shapes:
        found.append(Span(at, at + torch.Size(shape).numel(), shape))
        at = found[-1].stop
    return found


def coded(compressor: Compressor, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encodes a tensor: the message, the decoded message, and the residual."""
    left = tensor.clone()
    message = compressor.encode_residual_(left)
    return message, decoded(compressor, message, tensor.dtype), left


def decoded(compressor: Compressor, message: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    out = torch.full((compressor.count,), 7.0, dtype=dtype)
    compressor.decode(message, out)
    return out
