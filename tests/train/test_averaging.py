"""The average of a run's iterates, which evaluations judge in place of the last one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import ConfigError
from hpcdist.model import FlatModel
from hpcdist.train.evaluate import IterateAverage
from train import tiny


class One:
    size = 1


def test_later_iterates_count_more_and_the_first_one_replaces_the_initial_values():
    model = FlatModel(nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1)))
    average, weights = IterateAverage(model, One()), [0.0, 0.0]
    for step in range(1, 41):
        model.params[0].fill_(float(step))
        average.add()
        part = 4 / (step + 3)
        weights = [(1 - part) * weights[0] + part * (step <= 20), (1 - part) * weights[1] + part * step]
    assert weights[0] < 0.08, "of the first half; 1/16 in the limit"
    torch.testing.assert_close(average.params[0], torch.full_like(average.params[0], weights[1]))
    with model.swapped(average.params, average.buffers):
        assert model.params[0][0] == average.params[0][0]
    assert model.params[0][0] == 40


def test_evaluations_are_of_the_average_and_training_is_as_without(tmp_path):
    averaged = tiny.uninterrupted(1, tmp_path / "a", "average_iterates=true", "epochs=1")
    plain = tiny.uninterrupted(1, tmp_path / "b", "epochs=1")
    assert averaged.sha256 == plain.sha256 and averaged.metrics != plain.metrics


def test_a_run_goes_on_with_its_average(tmp_path):
    settings = ("average_iterates=true", "epochs=2", "checkpoint.every_steps=10")
    whole = tiny.uninterrupted(1, tmp_path, *settings)

    def rest(comm):
        made = tiny.trainer(comm, tmp_path, *settings[:2])
        summary = made.run(sorted(made.checkpoints.iterdir())[0])
        made.close()
        return summary

    assert run_virtual(rest, 1)[0].metrics == whole.metrics


def test_on_several_ranks_it_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="average_iterates must be false on more than one rank; got true on 2"):
        tiny.uninterrupted(2, tmp_path, "average_iterates=true")
