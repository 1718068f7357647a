"""jobs/studies/exo_gym.py: what can be seen without the other program; its own half, and its refusals."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

import exo_gym
import exo_gym_job
from hpcdist.errors import ConfigError


def test_the_rule_of_a_user_is_that_of_local_sgd(monkeypatch):
    monkeypatch.setattr(exo_gym_job, "STEPS", 45)
    own, ready = (exo_gym_job.by_hpcdist(name, 3, seed=1) for name in ("own", "local_sgd"))
    for one, other in zip(own.parameters(), ready.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert exo_gym.lines(exo_gym_job.WithLoss) == 6, "those of code"


def test_a_training_is_measured_in_a_process_of_its_own(tmp_path):
    found = exo_gym.run("hpcdist", "demo", 2, 0, tmp_path)
    assert len(found.parameters) == 64 * 64 + 64 + 64 * 10 + 10
    assert 0 < found.loss < 2.3 and found.seconds > 0 and found.megabytes > 50


def test_a_training_that_fails_or_lacks_the_other_program_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(ConfigError, match="must train nothing on 2 nodes; got status 1. Read .*nothing-2-0.log"):
        exo_gym.run("hpcdist", "nothing", 2, 0, tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package `exogym` must be there; got none"):
        exo_gym.main(tmp_path / "none")
