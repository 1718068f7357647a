"""fp16, bf16 and E3M0: which number each element becomes, the docstrings' errors, and what is too large waits."""

from __future__ import annotations

import torch

from compress.vectors import coded, make, normal
from harness.cases import each

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
RELATIVE = {"fp16": 2**-11, "bf16": 2**-8}
either = each("name", DTYPES)


@either
@each("dtype", [torch.float32, torch.float64])
def test_elements_are_rounded_to_nearest(name, dtype):
    tensor = normal(200_003, 1, dtype) * 100
    message, out, left = coded(make(name, len(tensor)), tensor)
    assert len(message) == 2 * len(tensor)
    assert torch.equal(out, tensor.to(DTYPES[name]).to(dtype)) and torch.equal(left, tensor - out)
    assert (left.abs() <= (RELATIVE[name] * tensor.abs()).clamp(min=3e-8 if name == "fp16" else 0)).all()
    total = tensor.clone()
    make(name, len(tensor)).combine(total, 3)  # a sum is rounded once, too
    assert torch.equal(total, left)


def test_what_is_too_large_waits():
    tensor, out = torch.tensor([1e5, -1.5e5, 1.0]), torch.zeros(3)
    compressor = make("fp16", 3)
    compressor.add(compressor.encode_residual_(tensor), out)
    assert tensor.tolist() == [1e5 - 65504, 65504 - 1.5e5, 0.0] and out.tolist() == [65504, -65504, 1]
    compressor.add(compressor.encode_residual_(tensor), out)
    assert out.tolist() == [1e5 - 1e5 % 32, -131008, 1]


@either
@each("size", [1, 2, 3, 7, 200])
def test_sums_over_ranks_are_finite(name, size):
    """Of the largest numbers on all ranks, each of which may be rounded up; what is too large for the sum waits."""
    compressor, tensor, out = make(name, 1), torch.tensor([3.4e38]), torch.zeros(1)
    total = compressor.start_sum(tensor.clone(), size)
    message = compressor.share(tensor, size)
    shares = torch.zeros(1)
    for _ in range(size - 1):
        compressor.add(message, total)
        compressor.add(message, shares)
    before = total.clamp(max=torch.finfo(torch.float32).max)
    compressor.add(compressor.combine(total, size), out)
    assert shares.isfinite() and out.isfinite() and total.isfinite() and tensor.isfinite()
    assert out + total == before and 0 < out <= torch.finfo(DTYPES[name]).max


@either
@each("size", [1, 3, 7])
@each("sign", [1, -1])
def test_elements_near_the_largest_are_cut_there_and_no_others(name, size, sign):
    info = torch.finfo(DTYPES[name])
    most = min(info.max, torch.finfo(torch.float32).max / size / (1 + info.eps)) if size > 1 else info.max
    for factor in (0.5, 0.98, 0.99, 0.999, 0.9999, 1.0, 1.0001, 1.001, 1.003):
        tensor, out = torch.tensor([sign * factor * most]).clamp(-3.4e38, 3.4e38), torch.empty(1)
        cut = tensor.clamp(-most, most).to(DTYPES[name]).float()
        before, compressor = tensor.clone(), make(name, 1)
        compressor.decode(compressor.share(tensor, size), out)
        assert torch.equal(out, cut) and torch.equal(tensor, before - cut)


# --- E3M0 -------------------------------------------------------------------------------------------------------------
@each("dtype", [torch.float32, torch.float64])
def test_every_code_is_its_power_of_two(dtype):
    powers = [2.0**-k for k in range(6, -1, -1)]
    values = torch.tensor([0.0, *powers, *[-p for p in powers]], dtype=dtype) * 3.0
    message, found, error = coded(make("e3m0", 15), values)
    assert torch.equal(found, values) and not error.any() and len(message) == 4 + 8


def test_halfway_is_rounded_away_from_zero():
    values = torch.tensor([1.0, 0.75, 0.7499999, 0.375, -0.375, 1.5 / 64, 1 / 128, 0.0078124, -1 / 128])
    assert coded(make("e3m0", 9), values)[1].tolist() == [1.0, 1.0, 0.5, 0.5, -0.5, 1 / 32, 1 / 64, 0.0, -1 / 64]


@each("dtype", [torch.float32, torch.float64])
@each("count", [1, 2, 7, 100_001])
def test_errors_are_at_most_a_third_and_nothing_is_lost(dtype, count):
    values = torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(count))
    message, found, error = coded(make("e3m0", count), values)
    scale = values.abs().max()
    assert len(message) == 4 + -(-count // 2)
    torch.testing.assert_close(found + error, values, rtol=0, atol=0)
    large = values.abs() >= scale / 64
    assert (error.abs()[large] <= values.abs()[large] * (1 / 3 + 1e-6)).all()
    assert not found[values.abs() < scale / 128].any()
    if dtype == torch.float32:
        assert found[values.abs().argmax()] == values[values.abs().argmax()]
