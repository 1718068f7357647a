"""Deep gradient compression: momentum before compression, masked where something was sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compress import vectors
from compress.vectors import normal
from harness.cases import each
from hpcdist.compress import Feedback


def make(count: int, dtype=torch.float64, **options) -> Feedback:
    return Feedback(vectors.make("dgc", count, **options), torch.zeros(count, dtype=dtype))


def sent(feedback: Feedback, gradient: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(feedback.residual)
    feedback.compressor.add(feedback.encode(gradient), out)
    return out


def named(message: torch.Tensor) -> int:
    return int(message[:4].numpy().view(np.uint32)[0])


@each("masking", [True, False])
@each("nesterov", [True, False])
def test_it_is_the_papers_algorithm(nesterov, masking):
    """Algorithm 4 of the paper written out: u ← mu + g; v ← v + u; the largest of v are sent, u and v masked there.

    With Nesterov's momentum as in the authors' code: u ← m(u + g), v ← v + u + g; without masking only v is masked.
    """
    count, size, momentum = 200, 10, 0.9
    feedback = make(count, ratio=size / count, momentum=momentum, values="fp64", nesterov=nesterov, masking=masking)
    u, v = torch.zeros(2, count, dtype=torch.float64)
    for step in range(50):
        gradient = normal(count, step)
        u = momentum * (u + gradient) if nesterov else momentum * u + gradient
        v = v + u + gradient if nesterov else v + u
        mask = torch.zeros(count, dtype=torch.bool)
        mask[v.abs().topk(size).indices] = True
        torch.testing.assert_close(sent(feedback, gradient), v * mask, rtol=1e-12, atol=1e-12)
        u, v = u * ~mask if masking else u, v * ~mask
        torch.testing.assert_close(feedback.residual, v, rtol=1e-12, atol=1e-12)


@each("nesterov", [True, False])
def test_sent_whole_it_is_sgd_with_momentum(nesterov):
    feedback, x = make(20, momentum=0.8, nesterov=nesterov), torch.zeros(20, dtype=torch.float64)
    theirs = torch.nn.Parameter(x.clone())
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.8, nesterov=nesterov)
    for step in range(20):
        theirs.grad = normal(20, step)
        optimizer.step()
        if step % 2:
            feedback.add_residual_(gradient := normal(20, step))
            x.sub_(gradient, alpha=0.1)
        else:
            feedback.add(feedback.encode(normal(20, step), whole=True), x, whole=True, weight=-0.1)
        assert not feedback.residual.any()
        torch.testing.assert_close(x, theirs.detach(), rtol=1e-13, atol=1e-13)


def test_the_ratio_falls_exponentially_from_a_quarter_and_a_large_one_stays():
    feedback = make(10_000, ratio=0.25 / 4**4, ramp_steps=4)
    assert [named(feedback.encode(normal(10_000, step))) for step in range(6)] == [2500, 625, 156, 39, 10, 10]
    for ratio in (0.25, 0.5):
        feedback = make(1000, ratio=ratio, ramp_steps=3)
        assert [named(feedback.encode(normal(1000, step))) for step in range(5)] == [1000 * ratio] * 5


def test_gradients_are_clipped_before_they_are_added():
    """Also where squares overflow, or vanish."""
    feedback = make(3, ratio=1.0, momentum=0.0, clip_norm=1.0, values="fp64")
    assert sent(feedback, torch.tensor([3.0, 0.0, 4.0], dtype=torch.float64)).tolist() == pytest.approx([0.6, 0, 0.8])
    assert sent(feedback, torch.tensor([0.3, 0.0, 0.4], dtype=torch.float64)).tolist() == [0.3, 0, 0.4]
    assert sent(feedback, torch.zeros(3, dtype=torch.float64)).tolist() == [0, 0, 0]
    for dtype, size in ((torch.float32, 3e38), (torch.float64, 1e308), (torch.float32, 1e-30)):
        norm = min(1.0, size)
        out = sent(make(4, dtype, ratio=1.0, momentum=0.0, clip_norm=norm), torch.full((4,), size, dtype=dtype))
        assert (out / norm).tolist() == pytest.approx([0.5] * 4, rel=1e-5)
