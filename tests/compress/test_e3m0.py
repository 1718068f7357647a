"""E3M0: which number each element becomes, how many bytes that takes, and what is left."""

from __future__ import annotations

import pytest
import torch

from compress import vectors
from harness.cases import each

pytestmark = pytest.mark.computes


def coded(values, **options):
    tensor = torch.as_tensor(values)
    compressor = vectors.make("e3m0", len(tensor), **options)
    error = tensor.clone()
    message = compressor.encode_residual_(error)
    out = torch.empty_like(tensor)
    compressor.decode(message, out)
    return message, out, error


@each("dtype", [torch.float32, torch.float64])
def test_every_code_is_its_power_of_two(dtype):
    powers = [2.0**-k for k in range(6, -1, -1)]
    values = torch.tensor([0.0, *powers, *[-p for p in powers]], dtype=dtype) * 3.0
    message, found, error = coded(values)
    assert torch.equal(found, values) and not error.any() and len(message) == 4 + 8


def test_halfway_is_rounded_away_from_zero():
    values = [1.0, 0.75, 0.7499999, 0.375, -0.375, 1.5 / 64, 1 / 128, 0.0078124, -1 / 128]
    assert coded(values)[1].tolist() == [1.0, 1.0, 0.5, 0.5, -0.5, 1 / 32, 1 / 64, 0.0, -1 / 64]


@each("dtype", [torch.float32, torch.float64])
@each("count", [1, 2, 7, 100_001])
def test_errors_are_at_most_a_third_and_nothing_is_lost(dtype, count):
    values = torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(count))
    message, found, error = coded(values)
    scale = values.abs().max()
    assert len(message) == 4 + -(-count // 2)
    torch.testing.assert_close(found + error, values, rtol=0, atol=0)
    large = values.abs() >= scale / 64
    assert (error.abs()[large] <= values.abs()[large] * (1 / 3 + 1e-6)).all()
    assert not found[values.abs() < scale / 128].any()
    if dtype == torch.float32:
        assert found[values.abs().argmax()] == values[values.abs().argmax()]


@each("values", [[0.0] * 5, [1e-38, -1e-38, 0.0], [], [3.4e38, -3.4e38, 1e38]])
def test_extreme_tensors_give_no_nan(values):
    tensor = torch.tensor(values)
    _, found, error = coded(tensor)
    assert torch.isfinite(found).all() and torch.isfinite(error).all()
    torch.testing.assert_close(found + error, tensor)


def test_magnitudes_beyond_float32_are_left_for_later():
    _, found, error = coded(torch.tensor([1e300, -1e300, 1.0], dtype=torch.float64))
    assert torch.isfinite(found).all() and error[0] == pytest.approx(1e300)


def test_weights_count():
    message, found, _ = coded(torch.tensor([1.0, -0.5, 0.3]))
    out = torch.ones(3)
    vectors.make("e3m0", 3).add(message, out, -2.0)
    assert torch.equal(out, 1 - 2 * found)
