"""EF-signSGD: the paper's algorithm, and its error."""

from __future__ import annotations

import pytest
import torch

from compress import vectors
from harness.cases import each
from hpcdist.compress import Feedback

SPANS = vectors.spans_of((7, 13), (5,), (3, 100_001), (), (0, 4))
COUNT = SPANS[-1].stop


def normal(seed: int, dtype=torch.float64) -> torch.Tensor:
    return vectors.normal(COUNT, seed, dtype) + 0.2


def test_it_is_the_papers_algorithm_by_layers():
    """p = g + e; Δ = (‖p‖₁/d) sign(p); e = p − Δ."""
    feedback = Feedback(vectors.make("ef_signsgd", COUNT, SPANS), normal(0))
    error = torch.zeros_like(normal(0))
    for step in range(5):
        p = normal(step) + error
        out = torch.zeros_like(p)
        feedback.add(feedback.encode(normal(step)), out)
        for span in SPANS:
            part, found = p[span.start : span.stop], out[span.start : span.stop]
            torch.testing.assert_close(found, part.sign() * part.abs().mean(), rtol=1e-6, atol=1e-12)
        error = p - out
        torch.testing.assert_close(feedback.residual, error, rtol=0, atol=1e-12)


@each("dtype", [torch.float32, torch.float64])
def test_the_error_is_that_of_the_docstring(dtype):
    left = normal(1, dtype)
    message = vectors.make("ef_signsgd", COUNT, SPANS).encode_residual_(left)
    assert len(message) == sum(-(-(s.stop - s.start) // 8) for s in SPANS) + 4 * 4
    for span in SPANS[:-1]:
        x, rest = (tensor[span.start : span.stop].double() for tensor in (normal(1, dtype), left))
        share = x.abs().sum() ** 2 / (len(x) * x.square().sum())
        torch.testing.assert_close(rest.square().sum(), (1 - share) * x.square().sum(), rtol=1e-4, atol=1e-9)


def test_it_converges_where_signs_alone_do_not():
    """The paper's counterexample: f(x) = ε|x₁ + x₂| + |x₁ − x₂| has its minimum at 0, and signs keep x₁ + x₂."""
    found = {}
    for enabled in (True, False):
        x = torch.tensor([1.0, 1.0], dtype=torch.float64)
        feedback = Feedback(vectors.make("ef_signsgd", 2), x, enabled)
        for step in range(2000):
            a, b = 0.5 * torch.sign(x.sum()), torch.sign(x[0] - x[1]) or 1.0
            gradient = torch.stack([a + b, a - b])
            feedback.add(feedback.encode(gradient), x, weight=-0.05 / (1 + step) ** 0.5)
        found[enabled] = x.sum().abs().item()
    assert found[False] == pytest.approx(2.0) and found[True] < 0.1
