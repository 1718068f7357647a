"""Top-k: exactly the largest, and a contraction."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcdist.compress import Feedback, load
from hpcdist.compress.coding import sparse
from hpcdist.errors import ConfigError

TopK = load("topk")


def make(count: int, **options):
    return TopK(TopK.Config(**options), count)


def normal(count: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def decoded(compressor, message, dtype=torch.float64) -> torch.Tensor:
    out = torch.empty(compressor.count, dtype=dtype)
    compressor.decode(message, out)
    return out


def test_the_largest_are_sent_and_the_others_kept():
    values = torch.tensor([0.5, -4.0, 0.0, 2.0, -1.0, 0.25], dtype=torch.float64)
    compressor = make(6, ratio=0.34)
    assert decoded(compressor, compressor.encode_residual_(values)).tolist() == [0, -4, 0, 2, 0, 0]
    assert values.tolist() == [0.5, 0, 0, 0, -1, 0.25]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "ratio"), [(1, 0.01), (50, 0.01), (1000, 0.1), (300_000, 0.001), (1000, 1.0)])
def test_as_many_as_the_ratio_says_and_at_least_one(count, ratio, dtype):
    values = normal(count, dtype=dtype)
    size = max(1, round(ratio * count))
    largest = torch.zeros_like(values)
    places = values.abs().topk(size).indices
    largest[places] = values[places]
    compressor = make(count, ratio=ratio, values="fp64")
    assert torch.equal(decoded(compressor, compressor.encode(values), dtype), largest)


@pytest.mark.parametrize("values", ["fp16", "fp32", "fp64"])
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 1.0])
def test_it_is_a_contraction(ratio, values):
    """‖x − C(x)‖² ≤ (1 − k/d)‖x‖² for any x, with equality where all elements are as large."""
    count, size = 2000, max(1, round(ratio * 2000))
    rounding = {"fp16": 2.0**-11, "fp32": 2.0**-24, "fp64": 2.0**-53}[values]
    vectors = [normal(count, seed) for seed in range(5)]
    vectors += [torch.ones(count, dtype=torch.float64), normal(count).pow(5), torch.eye(1, count)[0].double()]
    for x in vectors:
        left = x.clone()
        make(count, ratio=ratio, values=values).encode_residual_(left)
        assert left.square().sum() <= (1 - size / count + rounding**2 + 1e-15) * x.square().sum()
    equal = torch.ones(count, dtype=torch.float64)
    make(count, ratio=ratio, values=values).encode_residual_(equal)
    assert equal.square().sum() == count - size


@pytest.mark.parametrize(("values", "size"), [("fp16", 2), ("fp32", 4), ("fp64", 8)])
def test_the_bytes_are_those_of_the_docstring(values, size):
    x = normal(50_000)
    named = np.sort(x.abs().topk(500).indices.numpy())
    message = make(50_000, ratio=0.01, values=values).encode(x)
    assert len(message) == 4 + 500 * size + sparse.encode_indices(named, 50_000).nbytes
    assert len(message) == pytest.approx(4 + 500 * (size + (np.log2(100) + 1.44) / 8), rel=0.01)


@pytest.mark.parametrize(("values", "exact"), [("fp16", False), ("fp32", False), ("fp64", True)])
def test_what_rounding_takes_stays(values, exact):
    x = normal(1000)
    left, compressor = x.clone(), make(1000, ratio=1.0, values=values)
    sent = decoded(compressor, compressor.encode_residual_(left))
    assert bool((left == 0).all()) == exact
    assert torch.equal(sent + left, x)


def test_what_is_beyond_the_range_of_the_values_is_sent_bit_by_bit():
    feedback = Feedback(make(2, ratio=1.0, values="fp16"), torch.zeros(2))
    sent = torch.zeros(2)
    feedback.compressor.add(feedback.encode(torch.tensor([100_000.0, -1.0])), sent)
    assert sent.tolist() == [65_504, -1]
    feedback.compressor.add(feedback.encode(torch.zeros(2)), sent)
    assert sent.sum() == pytest.approx(99_999, abs=16)


def test_every_element_is_sent_in_the_end():
    """Error feedback: what is too small now adds up."""
    feedback = Feedback(make(100, ratio=0.05), torch.zeros(100, dtype=torch.float64))
    given, sent, gradient = *torch.zeros(2, 100, dtype=torch.float64), normal(100)
    for _ in range(400):
        given += gradient
        feedback.compressor.add(feedback.encode(gradient), sent)
    torch.testing.assert_close(given, sent + feedback.residual, rtol=0, atol=1e-9)
    assert (sent - given).norm() < 0.1 * given.norm()
    assert sent.count_nonzero() > 95


@pytest.mark.parametrize("options", [{"ratio": 0.0}, {"ratio": 1.01}, {"values": "fp8"}])
def test_options_are_checked(options):
    with pytest.raises(ConfigError, match="must be"):
        TopK.Config(**options)
