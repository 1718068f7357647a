"""A run that is saved and resumed goes on as if nothing had happened: optimizers, schedules, random generators."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from states import bits, loaded, save_alone, through_a_file

from harness.cases import each
from hpcdist.checkpoint import random_state, set_random_state, verify
from hpcdist.config.optimizer import OptimizerConfig, ScheduleConfig, optimizers
from hpcdist.errors import CheckpointError


def model_and(name, schedule):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3, bias=False)
    optimizer = OptimizerConfig(name=name).build(model.parameters())
    return model, optimizer, schedule.build(optimizer)


def train(model, optimizer, schedule, steps):
    x, y = torch.randn(8, 4), torch.randn(8, 3)

    def loss():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        if isinstance(optimizer, torch.optim.SparseAdam):
            model.weight.grad = model.weight.grad.to_sparse()
        return loss

    for _ in range(steps):
        optimizer.step(loss)
        metric = (0.5,) if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) else ()
        schedule.step(*metric)


@each("name", sorted(optimizers()))
def test_every_optimizer_resumes_to_the_bit(tmp_path, name):
    """And the schedule by a metric; tests/train/test_rates.py has the others."""
    schedule = ScheduleConfig(name="ReduceLROnPlateau", patience=0)
    parts = model_and(name, schedule)
    train(*parts, 3)
    state = {"random": random_state(), "parts": [part.state_dict() for part in parts]}
    path = save_alone(tmp_path, 3, state)
    train(*parts, 4)
    resumed = model_and(name, schedule)
    state = loaded(path)[0]
    for part, its in zip(resumed, state["parts"], strict=True):
        part.load_state_dict(its)
    set_random_state(state["random"])
    train(*resumed, 4)
    assert bits([part.state_dict() for part in resumed]) == bits([part.state_dict() for part in parts])


def draws():
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *torch.randn(3).tolist()]


def test_random_generators_go_on_where_they_were(tmp_path):
    draws()  # leaves NumPy's generator with half a pair of normals
    state = random_state()
    expected = draws()
    for saved in (state, through_a_file(tmp_path, state)):
        draws()
        set_random_state(saved)
        assert draws() == expected


def test_saving_and_loading_draw_no_random_numbers(tmp_path):
    before = bits(random_state())
    verify(save_alone(tmp_path, 1, {"a": torch.ones(2)}))
    assert bits(random_state()) == before


@each("broken", [{}, {"python": 3}, "drop", "shorten"])
def test_a_state_of_something_else_is_refused(broken):
    state = random_state()
    wrong = {"drop": {k: v for k, v in state.items() if k != "torch"}, "shorten": state | {"torch": state["torch"][:5]}}
    with pytest.raises(CheckpointError, match="random state must hold the states of python, numpy and torch; got "):
        set_random_state(wrong.get(broken, broken) if isinstance(broken, str) else broken)
    set_random_state(state)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_cuda_state_without_cuda_is_told():
    with pytest.warns(UserWarning, match="The checkpoint was saved with CUDA, which is not available here"):
        set_random_state(random_state() | {"cuda": torch.get_rng_state()})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_cuda_generator_goes_on_where_it_was(tmp_path):
    torch.randn(3, device="cuda")
    state = through_a_file(tmp_path, random_state() | {"on_device": torch.arange(5.0, device="cuda")})
    assert state["on_device"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    expected = torch.randn(3, device="cuda")
    set_random_state(state)
    assert torch.equal(torch.randn(3, device="cuda"), expected)
