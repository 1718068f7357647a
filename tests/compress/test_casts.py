"""fp16 and bf16: the docstrings' errors, and what is too large waits."""

from __future__ import annotations

import pytest
import torch

from hpcdist.compress import CompressionConfig

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
either = pytest.mark.parametrize("name", DTYPES)


def make(name: str, count: int):
    return CompressionConfig.from_mapping({"name": name}).make(count)


@either
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_elements_are_rounded_to_nearest(name, dtype):
    tensor = torch.randn(200_003, generator=torch.Generator().manual_seed(1), dtype=dtype) * 100
    left, out = tensor.clone(), torch.zeros_like(tensor)
    compressor = make(name, len(tensor))
    message = compressor.take(left)
    compressor.add(message, out, weight=0.5)
    assert len(message) == 2 * len(tensor)
    assert torch.equal(2 * out, tensor.to(DTYPES[name]).to(dtype)) and torch.equal(left, tensor - 2 * out)
    relative, least = {"fp16": (2**-11, 3e-8), "bf16": (2**-8, 0)}[name]
    assert (left.abs() <= (relative * tensor.abs()).clamp(min=least)).all()


def test_what_is_too_large_waits():
    tensor, out = torch.tensor([1e5, -1.5e5, 1.0]), torch.zeros(3)
    compressor = make("fp16", 3)
    compressor.add(compressor.take(tensor), out)
    assert tensor.tolist() == [1e5 - 65504, 65504 - 1.5e5, 0.0] and out.tolist() == [65504, -65504, 1]
    compressor.add(compressor.take(tensor), out)
    assert out.tolist() == [1e5 - 1e5 % 32, -131008, 1]


@either
@pytest.mark.parametrize("size", [2, 3, 5, 7, 64, 200])
def test_sums_over_ranks_are_finite_however_they_are_rounded(name, size):
    """The largest numbers on all ranks, one after the other and in a tree."""
    compressor, sent, out = make(name, 1), [], torch.zeros(1)
    compressor.reduce(torch.tensor([3e38]), out, size, sent.append)
    total, parts = sent[0].clone(), [sent[0]] * size
    for part in parts[1:]:
        total += part
    while len(parts) > 1:
        parts = [parts[at] + parts[at + 1] for at in range(0, len(parts) - 1, 2)] + parts[len(parts) // 2 * 2 :]
    assert torch.isfinite(total).all() and torch.isfinite(parts[0]).all() and out == sent[0].float()
