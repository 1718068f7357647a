"""1-bit: the best two values for the signs of each parameter, or of each row. EF-signSGD: the paper's algorithm."""

from __future__ import annotations

import torch

from compress import vectors
from harness.cases import each
from hpcdist.comm.chunks import CACHED
from hpcdist.compress import Feedback

SPANS = vectors.spans_of((7, 13), (5,), (3, 70_001), (), (2, 3, 4), (0, 4))  # whole bytes or not, pieces or not
COUNT = SPANS[-1].stop
BOTH = [torch.float32, torch.float64]


def parts(tensor: torch.Tensor, means: str) -> list[torch.Tensor]:
    found = [tensor[span.start : span.stop].view(span.shape) for span in SPANS if span.stop > span.start]
    rows = [part.flatten(1) if means == "row" and part.dim() > 1 else part.reshape(1, -1) for part in found]
    return [row for part in rows for row in part]


@each("dtype", BOTH)
@each("means", ["parameter", "row"])
def test_each_sign_stands_for_the_mean_of_its_elements_and_the_error_is_the_least(means, dtype):
    tensor = vectors.normal(COUNT, 1, dtype) + 0.3
    message, out, error = vectors.coded(vectors.make("onebit", COUNT, SPANS, means=means), tensor)
    bits = sum(-(-(span.stop - span.start) // 8) for span in SPANS)
    assert len(message) == bits + 8 * len(parts(tensor, means))
    for x, found, left in zip(parts(tensor, means), parts(out, means), parts(error, means), strict=True):
        x, left = x.double(), left.double()
        sides = [side for side in (x > 0, x <= 0) if side.any()]
        for side in sides:
            mean = x[side].mean().to(dtype).expand(int(side.sum()))
            torch.testing.assert_close(found[side], mean, rtol=1e-5, atol=0)
        least = x.square().sum() - sum(x[side].sum() ** 2 / int(side.sum()) for side in sides)
        torch.testing.assert_close(left.square().sum(), least, rtol=1e-4, atol=1e-9)
        bound = (1 - x.abs().sum() ** 2 / (len(x) * x.square().sum())) * x.square().sum()
        assert left.square().sum() <= bound * (1 + 1e-4) + 1e-9


def test_one_negative_element_among_many_is_not_lost():
    tensor = torch.ones(1_000_000)
    tensor[123_456] = -1e-3
    vectors.make("onebit", len(tensor)).encode_residual_(tensor)
    assert tensor.abs().max() < 1e-6


# --- EF-signSGD -------------------------------------------------------------------------------------------------------
@each("dtype", BOTH)
@each("spans", [SPANS, vectors.spans_of((CACHED,), (5,), (2 * CACHED,), (3, 4), (1,))])
def test_it_is_the_papers_algorithm_by_layers(spans, dtype):
    """p = g + e; Δ = (‖p‖₁/d) sign(p); e = p − Δ, of the length of the docstring."""
    count = spans[-1].stop

    def shifted(seed: int, dtype: torch.dtype) -> torch.Tensor:
        return vectors.normal(count, seed, dtype) + 0.2

    feedback = Feedback(vectors.make("ef_signsgd", count, spans), shifted(0, dtype))
    error, rtol = torch.zeros_like(shifted(0, dtype)), 1e-6 if dtype == torch.float64 else 1e-4
    for step in range(5):
        p = shifted(step, dtype) + error
        out = torch.zeros_like(p)
        feedback.add(message := feedback.encode(shifted(step, dtype)), out)
        assert len(message) == -(-count // 8) + 5 * 4
        for span in spans:
            part, found = p[span.start : span.stop], out[span.start : span.stop]
            torch.testing.assert_close(found, part.sign() * part.double().abs().mean().to(dtype), rtol=rtol, atol=1e-12)
        error = p - out
        torch.testing.assert_close(feedback.residual, error, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)
