"""Checkpoints by default: by time, at the end of long epochs and runs, of the best evaluation; none in short runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdist.comm.virtual import Constant, run_virtual
from hpcdist.config import JobConfig
from hpcdist.records import read_evaluations
from hpcdist.session.leaving import Leaving
from hpcdist.train.saving import Saving
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
