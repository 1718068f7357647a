"""Checkpoints by default: by time, at the end of long epochs and runs, of the best evaluation; none in short runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hpcdist.comm.virtual import Constant, run_virtual
from hpcdist.config.job import JobConfig
from hpcdist.errors import ConfigError
from hpcdist.model import FlatModel
from hpcdist.records import read_evaluations
from hpcdist.session.leaving import Leaving
from hpcdist.train.evaluate import IterateAverage
from hpcdist.train.stop_conditions import Saving
from train import tiny

STEP_S = 0.1  # an epoch of two ranks has 12 steps


def _saved(folder: Path, *overrides: str, ranks: int = 2) -> list[int]:
    """Trains with meetings at the virtual clock; the steps of the checkpoints that are there at the end."""

    def body(comm):
        with tiny.training(comm, folder, *overrides) as trainer:
            trainer.leaving = Leaving(comm, every_s=0.2, clock=comm.now)
            trainer.run()

    run_virtual(body, ranks, compute=Constant(STEP_S))
    return sorted(int(path.name[5:]) for path in (folder / "run" / "checkpoints").glob("step-????????"))


def test_a_short_run_saves_nothing(tmp_path):
    assert _saved(tmp_path) == [] and not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("strategy", ["allreduce", "hardsync", "gossip_pull"])
def test_all_ranks_save_at_the_same_steps_by_the_first_one_s_clock(tmp_path, strategy):
    settings = ("checkpoint.every_s=0.75", "checkpoint.keep=9", "checkpoint.best=false", f"strategy={strategy}")
    found = _saved(tmp_path, *settings, "epochs=2", ranks=3)
    last = read_evaluations(tmp_path / "run")[-1].step
    assert 8 <= found[0] < last == found[-1], "not before 0.75 s, which are eight steps; the run's end, too"


def test_the_newest_two_and_the_best_are_kept(tmp_path):
    found = _saved(tmp_path, "checkpoint.every_s=0.5", "optimizer.lr=0.3", "schedule=none", "epochs=6")
    evaluations = {one.step: one.metrics["accuracy"] for one in read_evaluations(tmp_path / "run")}
    best = max(evaluations, key=evaluations.get)
    assert best in found and len(found) <= 3 and 72 in found, (found, evaluations)


def test_when_a_checkpoint_is_due():
    class Meetings:
        clock_s = None

    meetings = Meetings()
    due = _asking(Saving(JobConfig(checkpoint={"every_s": 10.0}), meetings), meetings)
    assert [due(at) for at in (100.0, 109.0, 110.0, 119.0, 121.0)] == [False, False, True, False, True]
    assert not due(125.0, improved=False) and due(125.0, improved=True), "a run of 25 s; the best is saved at once"
    assert due(126.0, epoch_ends=True), "an epoch of 26 s"
    assert not due(130.0, epoch_ends=True) and due(131.0, run_ends=True)

    short = {"checkpoint": {"every_s": 0.0, "every_steps": 4}, "stop": {"patience": 2}}
    due = _asking(Saving(JobConfig(**short), meetings), meetings)
    assert [due(0.0, step=step) for step in (3, 4)] == [False, True]
    assert due(0.0, improved=True), "with patience the best is what the run is for"
    assert not due(9999.0, epoch_ends=True, run_ends=True), "none by time"
    due = _asking(Saving(JobConfig(checkpoint={"every_s": 10.0, "best": False}), meetings), meetings)
    assert [due(at, improved=True) for at in (0.0, 9.0)] == [False, False]
    assert not Saving(JobConfig(), None).is_due(1, epoch_ends=True, run_ends=True, improved=True), "they don't meet"


def _asking(saving: Saving, meetings):
    def due(now_s: float, step: int = 1, **given: bool) -> bool:
        meetings.clock_s = now_s
        return saving.is_due(step, **{"epoch_ends": False, "run_ends": False, "improved": False, **given})

    return due


# --- the average of a run's iterates, which evaluations judge in place of the last one --------------------------------
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


def test_evaluations_are_of_the_average_which_a_run_goes_on_with_and_training_is_as_without(tmp_path):
    settings = ("average_iterates=true", "epochs=2", "checkpoint.every_steps=10")
    whole = tiny.uninterrupted(1, tmp_path, *settings)
    plain = tiny.uninterrupted(1, tmp_path / "plain", "epochs=2")
    assert whole.sha256 == plain.sha256 and whole.metrics != plain.metrics

    def rest(comm):
        with tiny.training(comm, tmp_path, *settings[:2]) as made:
            return made.run(sorted(made.checkpoints.iterdir())[0])

    assert run_virtual(rest, 1)[0].metrics == whole.metrics


def test_on_several_ranks_it_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="average_iterates must be false on more than one rank; got true on 2"):
        tiny.uninterrupted(2, tmp_path, "average_iterates=true")
