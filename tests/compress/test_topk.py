"""Top-k: exactly the largest, and a contraction."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from compress import vectors
from compress.vectors import coded, normal
from harness.cases import each
from hpcdist.compress import Feedback
from hpcdist.compress.coding import sparse

BYTES = {"fp16": 2, "fp32": 4, "fp64": 8}
dtypes = each("dtype", [torch.float32, torch.float64])


make = functools.partial(vectors.make, "topk")


@dtypes
@each("case", [(1, 0.01), (50, 0.01), (1000, 0.1), (300_000, 0.001), (1000, 1.0)])
def test_the_largest_are_sent_as_many_as_the_ratio_says_and_at_least_one(case, dtype):
    count, ratio = case
    values = normal(count, dtype=dtype)
    largest = torch.zeros_like(values)
    places = values.abs().topk(max(1, round(ratio * count))).indices
    largest[places] = values[places]
    _, sent, left = coded(make(count, ratio=ratio, values="fp64"), values)
    assert torch.equal(sent, largest) and torch.equal(left, values - largest)


@each("values", BYTES)
@each("ratio", [0.001, 0.3, 1.0])
def test_it_is_a_contraction(ratio, values):
    """‖x − C(x)‖² ≤ (1 − k/d)‖x‖² for any x, with equality where all elements are as large."""
    count, size = 2000, max(1, round(ratio * 2000))
    rounding = {"fp16": 2.0**-11, "fp32": 2.0**-24, "fp64": 2.0**-53}[values]
    drawn = [normal(count, seed) for seed in range(2)]
    drawn += [torch.ones(count, dtype=torch.float64), normal(count).pow(5), torch.eye(1, count)[0].double()]
    for x in drawn:
        *_, left = coded(make(count, ratio=ratio, values=values), x)
        assert left.square().sum() <= (1 - size / count + rounding**2 + 1e-15) * x.square().sum()
    equal = torch.ones(count, dtype=torch.float64)
    make(count, ratio=ratio, values=values).encode_residual_(equal)
    assert equal.square().sum() == count - size


@each("values", BYTES)
def test_the_bytes_are_those_of_the_docstring_and_rounding_stays(values):
    x, size = normal(50_000), BYTES[values]
    named = np.sort(x.abs().topk(500).indices.numpy())
    message = make(50_000, ratio=0.01, values=values).encode(x)
    assert len(message) == 4 + 500 * size + sparse.encode_indices(named, 50_000).nbytes
    assert len(message) == pytest.approx(4 + 500 * (size + (np.log2(100) + 1.44) / 8), rel=0.01)
    _, sent, left = coded(make(50_000, ratio=1.0, values=values), x)
    assert bool((left == 0).all()) == (values == "fp64") and torch.equal(sent + left, x)


def test_what_is_beyond_the_range_of_the_values_is_sent_bit_by_bit():
    feedback = Feedback(make(2, ratio=1.0, values="fp16"), torch.zeros(2))
    sent = torch.zeros(2)
    feedback.compressor.add(feedback.encode(torch.tensor([100_000.0, -1.0])), sent)
    assert sent.tolist() == [65_504, -1]
    feedback.compressor.add(feedback.encode(torch.zeros(2)), sent)
    assert sent.sum() == pytest.approx(99_999, abs=16)
