"""Deep gradient compression: momentum before compression, masked where something was sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcdist.compress import Feedback, load
from hpcdist.errors import ConfigError

Dgc = load("dgc")


def make(count: int, dtype=torch.float64, **options) -> Feedback:
    return Feedback(Dgc(Dgc.Config(**options), count), torch.zeros(count, dtype=dtype))


def normal(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sent(feedback: Feedback, gradient: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(feedback.residual)
    feedback.compressor.add(feedback.encode(gradient), out)
    return out


def named(message: torch.Tensor) -> int:
    return int(message[:4].numpy().view(np.uint32)[0])


def test_it_is_the_papers_algorithm():
    """Algorithm 4 of the paper written out: u ← mu + g; v ← v + u; the largest of v are sent, u and v masked there."""
    count, size, momentum = 200, 10, 0.9
    feedback = make(count, ratio=size / count, momentum=momentum, values="fp64")
    u, v = torch.zeros(2, count, dtype=torch.float64)
    for step in range(50):
        gradient = normal(count, step)
        u = momentum * u + gradient
        v = v + u
        mask = torch.zeros(count, dtype=torch.bool)
        mask[v.abs().topk(size).indices] = True
        torch.testing.assert_close(sent(feedback, gradient), v * mask, rtol=1e-12, atol=1e-12)
        u, v = u * ~mask, v * ~mask
        torch.testing.assert_close(feedback.residual, v, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_nesterovs_momentum_and_masking_are_options(nesterov, masking):
    """As in the authors' code: u ← m(u + g), v ← v + u + g with Nesterov's; only v is masked without masking of u."""
    count, size, momentum = 200, 10, 0.9
    feedback = make(count, ratio=size / count, momentum=momentum, values="fp64", nesterov=nesterov, masking=masking)
    u, v = torch.zeros(2, count, dtype=torch.float64)
    for step in range(50):
        gradient = normal(count, step)
        if nesterov:
            u = momentum * (u + gradient)
            v = v + u + gradient
        else:
            u = momentum * u + gradient
            v = v + u
        mask = torch.zeros(count, dtype=torch.bool)
        mask[v.abs().topk(size).indices] = True
        torch.testing.assert_close(sent(feedback, gradient), v * mask, rtol=1e-12, atol=1e-12)
        u, v = u * ~mask if masking else u, v * ~mask


@pytest.mark.parametrize("nesterov", [True, False])
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


def test_sending_all_each_time_masks_all_velocity():
    """So nothing is left of momentum, and what is sent is the gradient."""
    feedback = make(50, ratio=1.0, momentum=0.9, values="fp64")
    for step in range(5):
        assert torch.equal(sent(feedback, normal(50, step)), normal(50, step))


def test_what_waits_gathers_momentum():
    """A constant gradient that waits T steps is sent as momentum SGD would have moved meanwhile."""
    feedback, momentum = make(2, ratio=0.5, momentum=0.5), 0.5
    gradient = torch.tensor([1.0, 100.0], dtype=torch.float64)
    for _ in range(3):
        assert sent(feedback, gradient).tolist() == [0, 100]
    velocities = np.cumsum(momentum ** np.arange(4))  # 1, 1.5, 1.75, 1.875
    assert sent(feedback, torch.tensor([1.0, 0.0], dtype=torch.float64)).tolist() == [velocities.sum(), 0]


def test_without_momentum_it_is_topk():
    TopK = load("topk")
    top = Feedback(TopK(TopK.Config(ratio=0.02), 300), torch.zeros(300, dtype=torch.float64))
    feedback = make(300, ratio=0.02, momentum=0.0)
    for step in range(20):
        assert torch.equal(feedback.encode(normal(300, step)), top.encode(normal(300, step)))


def test_the_ratio_falls_exponentially_from_a_quarter():
    count, ramp = 10_000, 4
    feedback = make(count, ratio=0.25 / 4**4, ramp_steps=ramp)
    found = [named(feedback.encode(normal(count, step))) for step in range(6)]
    assert found == [2500, 625, 156, 39, 10, 10]


@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_a_large_ratio_does_not_fall_or_rise(ratio):
    feedback = make(1000, ratio=ratio, ramp_steps=3)
    assert [named(feedback.encode(normal(1000, step))) for step in range(5)] == [1000 * ratio] * 5


def test_gradients_are_clipped_before_they_are_added():
    feedback = make(3, ratio=1.0, momentum=0.0, clip_norm=1.0, values="fp64")
    assert sent(feedback, torch.tensor([3.0, 0.0, 4.0], dtype=torch.float64)).tolist() == pytest.approx([0.6, 0, 0.8])
    assert sent(feedback, torch.tensor([0.3, 0.0, 0.4], dtype=torch.float64)).tolist() == [0.3, 0, 0.4]
    assert sent(feedback, torch.zeros(3, dtype=torch.float64)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 3e38), (torch.float64, 1e308), (torch.float32, 1e-30)])
def test_gradients_of_any_size_are_clipped_to_the_norm(dtype, size):
    """Also where squares overflow, or vanish."""
    norm = min(1.0, size)
    feedback = make(4, dtype, ratio=1.0, momentum=0.0, clip_norm=norm)
    out = sent(feedback, torch.full((4,), size, dtype=dtype))
    assert (out / norm).tolist() == pytest.approx([0.5] * 4, rel=1e-5)


def test_velocity_and_ramp_go_on_from_a_state():
    options = {"ratio": 0.01, "ramp_steps": 10, "momentum": 0.8}
    first, second = make(1000, **options), make(1000, **options)
    for step in range(5):
        first.encode(normal(1000, step))
    second.load_state(first.state())
    for step in range(5, 15):
        assert torch.equal(first.encode(normal(1000, step)), second.encode(normal(1000, step)))


def test_a_state_from_before_the_first_step_is_one_too():
    first, second = make(10, ratio=0.1), make(10, ratio=0.1)
    second.load_state(first.state())
    assert torch.equal(first.encode(normal(10)), second.encode(normal(10)))


@pytest.mark.parametrize("options", [{"momentum": 1.0}, {"ramp_steps": -1}, {"clip_norm": 0.0}])
def test_options_are_checked(options):
    with pytest.raises(ConfigError, match="must be"):
        Dgc.Config(**options)
