"""1-bit: the best two values for the signs of each parameter, or of each row."""

from __future__ import annotations

import pytest
import torch

from hpcdist.compress import CompressionConfig, Span

SHAPES = [(7, 13), (5,), (3, 70_001), (), (2, 3, 4), (0, 4)]  # whole bytes or not, one chunk or several


def spans() -> list[Span]:
    found, at = [], 0
    for shape in SHAPES:
        size = torch.Size(shape).numel()
        found.append(Span(at, at + size, shape))
        at += size
    return found


def parts(tensor: torch.Tensor, means: str) -> list[torch.Tensor]:
    found = [tensor[span.start : span.stop].view(span.shape) for span in spans() if span.stop > span.start]
    rows = [part.flatten(1) if means == "row" and part.dim() > 1 else part.reshape(1, -1) for part in found]
    return [row for part in rows for row in part]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("means", ["parameter", "row"])
def test_each_sign_stands_for_the_mean_of_its_elements(means, dtype):
    count = spans()[-1].stop
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=dtype) + 0.3
    compressor = CompressionConfig.from_mapping({"name": "onebit", "means": means}).make(count, spans())
    out = torch.zeros_like(tensor)
    message = compressor.encode(tensor)
    compressor.add(message, out, weight=2.0)
    bits = sum(-(-(span.stop - span.start) // 8) for span in spans())
    assert len(message) == bits + 8 * len(parts(tensor, means))
    for values, found in zip(parts(tensor, means), parts(out / 2, means), strict=True):
        for side in (values > 0, values <= 0):
            if side.any():
                torch.testing.assert_close(found[side], values[side].mean().expand(int(side.sum())), rtol=1e-5, atol=0)


@pytest.mark.parametrize("means", ["parameter", "row"])
def test_the_error_is_that_of_the_docstring(means):
    count = spans()[-1].stop
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    error = tensor.clone()
    CompressionConfig.from_mapping({"name": "onebit", "means": means}).make(count, spans()).encode_residual_(error)
    for x, left in zip(parts(tensor, means), parts(error, means), strict=True):
        bound = (1 - x.abs().sum() ** 2 / (len(x) * x.square().sum())) * x.square().sum()
        sides = [x[side] for side in (x > 0, x <= 0)]
        least = x.square().sum() - sum(s.sum() ** 2 / len(s) for s in sides if len(s))
        torch.testing.assert_close(left.square().sum(), least, rtol=1e-6, atol=1e-12)
        assert left.square().sum() <= bound * (1 + 1e-9) + 1e-12


def test_one_negative_element_among_many_is_not_lost():
    tensor = torch.ones(1_000_000)
    tensor[123_456] = -1e-3
    compressor = CompressionConfig.from_mapping({"name": "onebit"}).make(len(tensor))
    compressor.encode_residual_(tensor)
    assert tensor.abs().max() < 1e-6
