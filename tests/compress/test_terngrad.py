"""TernGrad: unbiased, with the variance of the docstring, by parameters, clipped."""

from __future__ import annotations

import functools

import torch

from compress import vectors
from compress.vectors import normal
from harness.cases import each
from hpcdist.compress.coding.elements import mean

SPANS = vectors.spans_of((7, 13), (5,), (4, 75_001))
COUNT = SPANS[-1].stop


make = functools.partial(vectors.make, "terngrad")


def decoded(compressor, tensor: torch.Tensor) -> torch.Tensor:
    return vectors.decoded(compressor, compressor.encode(tensor), tensor.dtype)


@each("dtype", [torch.float32, torch.float64])
@each("clip", [None, 2.5])
def test_elements_become_0_or_their_sign_times_the_largest(dtype, clip):
    values = normal(COUNT, dtype=dtype)
    compressor = make(COUNT, SPANS, clip=clip)
    found = decoded(compressor, values)
    assert len(compressor.encode(values)) == -(-COUNT // 5) + 4 * len(SPANS)
    for span in SPANS:
        part, out = (tensor[span.start : span.stop] for tensor in (values, found))
        most = part.abs().max().item()
        scale = most if clip is None else min(most, clip * mean(part, 2))
        torch.testing.assert_close(out, torch.where(out == 0, 0.0, part.sign() * scale), rtol=1e-6, atol=0)
        assert (out[part.abs() >= scale * (1 + 1e-6)] != 0).all(), "what is as large as s is sent"


def test_the_expectation_is_the_gradient_and_the_variance_that_of_the_docstring():
    values, draws = normal(500), 1000
    compressor = make(500, clip=None)
    found = torch.stack([decoded(compressor, values) for _ in range(draws)])
    scale = values.abs().max()
    expected = scale * values.abs() - values**2  # of each element
    assert ((found.mean(dim=0) - values).abs() <= 5 * (expected / draws).sqrt() + 1e-4).all()
    torch.testing.assert_close(found.var(dim=0), expected, rtol=0.15, atol=0.1)
    assert expected.sum() <= (500**0.5 - 1) / 2 * values.square().sum()


def test_ranks_and_steps_draw_apart_and_a_seed_the_same():
    values = normal(500)
    one, same, other, elsewhere = make(500), make(500), make(500, seed=1), make(500, stream=1)
    first = decoded(one, values)
    assert torch.equal(first, decoded(same, values))
    for found in (decoded(one, values), decoded(other, values), decoded(elsewhere, values)):
        assert not torch.equal(found, first)


def test_zeros_are_never_chosen():
    values = normal(100_000)
    values[::2] = 0
    assert not decoded(make(100_000), values)[::2].any()
