"""Strom's threshold: what it sends, what it keeps, and a threshold chosen by density."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from compress import vectors
from compress.vectors import decoded, normal
from harness.cases import each
from hpcdist.compress import Feedback, load
from hpcdist.compress.coding import sparse
from hpcdist.errors import ConfigError

make = functools.partial(vectors.make, "threshold")


def test_elements_above_the_threshold_are_sent_as_its_sign_and_keep_the_rest():
    """The rest, not zero: what documentation calls clearing the residual loses mass."""
    values = torch.tensor([0.1, 3.0, -0.75, 0.5, -0.4, 1e9], dtype=torch.float64)
    compressor = make(6, tau=0.5)
    message = compressor.encode_residual_(values)
    assert decoded(compressor, message).tolist() == [0, 0.5, -0.5, 0, 0, 0.5]
    assert values.tolist() == [0.1, 2.5, -0.25, 0.5, -0.4, 1e9 - 0.5]


def test_gradients_within_the_threshold_leave_a_residual_within_it():
    tau = 0.25
    feedback = Feedback(make(1000, tau=tau), torch.zeros(1000, dtype=torch.float64))
    for step in range(300):
        gradient = normal(1000, step).clamp(-tau, tau)
        if step % 3 == 0:
            gradient = torch.full_like(gradient, tau)  # pushes as hard as it may
        feedback.encode(gradient)
        assert feedback.residual.abs().max() <= tau


@each("dtype", [torch.float32, torch.float64])
@each("tau", [0.1, 1.5, 3.0])
def test_the_bytes_are_those_of_the_docstring(tau, dtype):
    values = normal(20_000, dtype=dtype)
    named = np.flatnonzero(values.abs().numpy() > np.float32(tau))
    message = make(20_000, tau=tau).encode(values)
    assert len(message) == 8 + -(-len(named) // 8) + sparse.encode_indices(named, 20_000).nbytes
    part = len(named) / 20_000
    if part < 0.2:
        per_index = np.log2(1 / part) + 1.44
        assert len(message) == pytest.approx(8 + len(named) / 8 * (1 + per_index), rel=0.1, abs=8)


# --- by density -------------------------------------------------------------------------------------------------------
@each("count", [20_000, 400_000])
def test_the_density_stays_near_the_target_as_residuals_grow(count):
    density = 0.005
    feedback = Feedback(make(count, density=density), torch.zeros(count))
    layers = torch.logspace(-3, 0, 8).repeat_interleave(count // 8)  # gradients of layers differ in size
    found = []
    for step in range(40):
        message = feedback.encode(layers * normal(count, step, torch.float32))
        found.append(int(message[:4].numpy().view(np.uint32)[0]) / count)
    assert np.mean(found) == pytest.approx(density, rel=0.05)
    assert max(found) < 1.6 * density


def test_where_few_elements_are_not_zero_they_are_sent_all_the_same():
    """As gradients of an embedding: the wanted quantile of the magnitudes is zero."""
    values = torch.zeros(1000)
    values[:5] = torch.tensor([1.0, -2.0, 3.0, 4.0, -5.0])
    compressor, before = make(1000, density=0.05), values.norm()
    for _ in range(40):
        compressor.encode_residual_(values)
    assert values.norm() < 0.1 * before


@each("dtype", [torch.float32, torch.float64])
def test_equal_elements_are_sent_all_the_same(dtype):
    values = torch.full((1000,), -0.3, dtype=dtype)
    compressor = make(1000, density=0.05)
    assert decoded(compressor, compressor.encode_residual_(values), dtype).tolist() == pytest.approx([-0.3] * 1000)
    assert values.abs().max() < 1e-7


def test_what_is_too_small_for_float32_waits():
    values = torch.full((10,), 1e-60, dtype=torch.float64)
    assert len(make(10, density=0.5).encode_residual_(values)) == 0
    assert values.tolist() == [1e-60] * 10


def test_the_threshold_and_a_density_are_not_given_together():
    with pytest.raises(ConfigError, match="tau must be none where a density is given; got tau = 0.1, density = 0.1"):
        load("threshold").Config(tau=0.1, density=0.1)
