"""Mean magnitudes of any numbers."""

from __future__ import annotations

import math

import pytest
import torch

from hpcdist.compress.coding.pieces import mean


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_mean_of_powers(order, dtype):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=dtype)
    expected = values.double().abs().pow(order).mean().pow(1 / order).item()
    assert mean(values, order) == pytest.approx(expected, rel=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_neither_overflows_nor_vanishes(order, dtype):
    info = torch.finfo(dtype)
    for size in (info.max, info.max / 3, info.smallest_normal, 1e-40):
        values = torch.full((7,), size, dtype=dtype)
        found = mean(values, order)
        assert math.isfinite(found) and found == pytest.approx(values[0].item(), rel=1e-6)
        assert found <= values[0].item() * (1 + 16 * info.eps)


def test_of_nothing_and_of_zeros_it_is_zero():
    assert mean(torch.zeros(0)) == mean(torch.zeros(3)) == mean(torch.zeros(3), 2) == 0
