"""Runs that end early because they get no better."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from hpcdist import checkpoint
from hpcdist.comm.virtual import run_virtual
from hpcdist.config.job import JobConfig
from hpcdist.errors import UnknownNameError
from hpcdist.records import load_summary, read_evaluations
from hpcdist.train import Metric
from hpcdist.train.stop_conditions import EarlyStopping
from train import tiny

# A metric that is the same in all evaluations.
CONSTANT = dataclasses.replace(
    tiny.job, metrics={"constant": Metric(lambda outputs, targets: torch.ones(len(targets)))}
)


def run(folder: Path, *overrides: str, ranks: int = 3, of=CONSTANT, resume=None):
    return run_virtual(lambda comm: tiny.run(comm, folder, *overrides, of=of, resume=resume)[0], ranks)


@pytest.mark.parametrize("strategy", ["allreduce", "parameter_server", "gossip_pull"])
def test_all_ranks_stop_at_the_same_step_under_any_strategy(tmp_path, strategy):
    first, *others = run(tmp_path, f"strategy={strategy}", "epochs=9", "stop.patience=2")
    steps = [one.step for one in read_evaluations(tmp_path / "run")]
    assert len(steps) == 3 and all(other == first for other in others)
    said = f"stopped early at step {steps[-1]}: constant no better for 2 evaluations; best 1 at step {steps[0]}"
    assert first.stopped_early == said == load_summary(tmp_path / "run").stopped_early
    path = str(tmp_path / "run" / "checkpoints" / f"step-{steps[0]:08d}")
    assert first.best.model_dump() == {"metric": "constant", "value": 1.0, "step": steps[0], "checkpoint": path}


def test_a_stopped_run_that_is_resumed_has_ended_unless_it_may_wait_longer(tmp_path):
    first, *_ = run(tmp_path, "epochs=9", "stop.patience=1", "checkpoint.every_steps=8", ranks=3)
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert run(tmp_path, "epochs=9", "stop.patience=1", resume=newest)[0].stopped_early == first.stopped_early
    longer, *_ = run(tmp_path, "epochs=9", "stop.patience=3", resume=newest)
    assert "no better for 3 evaluations; best 1 at step 8" in longer.stopped_early


def test_inside_an_epoch_too_and_by_any_metric(tmp_path):
    settings = ("epochs=3", "eval_every_samples=100", "stop.patience=1", "stop.metric=loss", "optimizer.lr=30.0")
    summary, _ = run(tmp_path, *settings, "schedule=none", ranks=2, of=tiny.job)
    assert summary.stopped_early is not None and ": loss no better for 1 evaluation; best " in summary.stopped_early
    assert summary.best.metric == "loss" and read_evaluations(tmp_path / "run")[-1].step < 36


def test_a_run_that_goes_on_getting_better_does_not_stop(tmp_path):
    summary, _ = run(tmp_path, "stop.patience=3", ranks=2, of=tiny.job)
    assert summary.stopped_early is None and summary.best.metric == "accuracy"


def test_which_evaluation_is_the_best():
    early_stopping = EarlyStopping(tiny.job, JobConfig(stop={"patience": 2}))
    assert early_stopping.best is None and not early_stopping.reason
    early_stopping.add(
        [(1, {"accuracy": math.nan}), (2, {"accuracy": 0.5}), (3, {"accuracy": 0.7}), (4, {"accuracy": 0.7})]
    )
    assert (
        early_stopping.best == (3, 0.7)
        and early_stopping.steps == [3, 4, 2]
        and not early_stopping.improved
        and not early_stopping.reason
    )
    early_stopping.add([(4, {"accuracy": 0.9}), (5, {"accuracy": math.nan})])
    assert early_stopping.reason and str(early_stopping) == "accuracy no better for 2 evaluations; best 0.7 at step 3"
    early_stopping = EarlyStopping(tiny.job, JobConfig(stop={"patience": 1, "metric": "loss"}))
    early_stopping.add([(1, {"loss": math.inf})])
    assert early_stopping.reason and str(early_stopping) == "loss not finite for 1 evaluation"
    early_stopping.add([(2, {"loss": 2.0}), (3, {"loss": 1.0})])
    assert early_stopping.best == (3, 1.0) and early_stopping.improved and not early_stopping.reason


def test_a_metric_that_the_job_does_not_have_is_refused():
    message = "stop.metric must be one of accuracy, loss; got 'acuracy'. Did you mean"
    with pytest.raises(UnknownNameError, match=message):
        EarlyStopping(tiny.job, JobConfig(stop={"metric": "acuracy"}))
