"""Runs that end after a number of samples, of steps, or of seconds, and are evaluated inside epochs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from comm.jobs_here import run
from faults.deaths import ULFM, survivable
from harness.cases import each
from hpcdist import checkpoint
from hpcdist.comm.virtual import Constant, run_virtual
from hpcdist.config.job import JobConfig
from hpcdist.errors import ConfigError
from hpcdist.records import load_summary, read_evaluations, read_records
from hpcdist.train.runs import specify
from train import tiny

pytestmark = pytest.mark.computes
some = pytest.mark.parametrize("name", ["allreduce", "parameter_server", "gossip_pull"])
STEP_S = 0.01
N_SAMPLES = 359  # of tiny's epoch
WITHOUT_END = ("epochs=none", "schedule=none")


def _run(comm, folder, *overrides, **given):
    return tiny.run(comm, folder, *WITHOUT_END, *overrides, **given)


def _samples(folder):
    """Of all workers together, by their step."""
    totals = {}
    for records in read_records(folder / "run").values():
        for record in records:
            totals[record.step] = totals.get(record.step, 0) + record.samples
    return totals


@some
@pytest.mark.sizes(4)
def test_a_run_ends_after_the_step_that_reaches_its_samples(ranks, shared_tmp_path, name):
    options = (f"strategy={name}", "budget.samples=500")
    found = ranks(lambda comm: _run(comm, shared_tmp_path, *options)[0], compute=Constant(STEP_S))
    batch = 16 * found[0].workers
    first, second = -(-N_SAMPLES // batch), -(-(500 - N_SAMPLES) // batch)
    last = read_evaluations(shared_tmp_path / "run")[-1]
    assert (last.epoch, last.step, last.samples) == (1, first + second, N_SAMPLES + second * batch)
    assert found == [load_summary(shared_tmp_path / "run")] * len(found)
    assert found[0].samples == last.samples and found[0].metrics == last.metrics
    if name != "parameter_server":  # where a worker may be ahead of the others
        steps = list(_samples(shared_tmp_path).values())
        assert sum(steps[:-1]) < 500 <= sum(steps)


@some
@each("steps", [5, 12])  # in the first epoch, and in the second
def test_a_run_ends_after_its_steps(tmp_path, name, steps):
    folder = tmp_path / str(steps)
    run_virtual(lambda comm: _run(comm, folder, f"strategy={name}", f"budget.steps={steps}"), 3)
    workers = [records for records in read_records(folder / "run").values() if any(r.samples for r in records)]
    assert all(max(record.step for record in records) == steps for records in workers)
    assert read_evaluations(folder / "run")[-1].step == steps


@some
@each("seconds", [0.004, 0.135])
def test_a_run_ends_after_the_step_that_reaches_its_seconds(tmp_path, name, seconds):
    folder, options = tmp_path / str(seconds), (f"strategy={name}", f"budget.seconds={seconds}")
    summary, _ = run_virtual(lambda comm: _run(comm, folder, *options), 3, compute=Constant(STEP_S))[0]
    assert seconds <= summary.wall_s + 1e-9 < seconds + STEP_S + 1e-6
    assert read_evaluations(folder / "run")[-1].seconds == summary.wall_s


def test_ranks_look_at_the_clock_seldom(tmp_path):
    """So that those that wait for nobody don't in the steps between."""
    looks = []

    def body(comm):
        with tiny.training(comm, tmp_path, *WITHOUT_END, "strategy=gossip_pull", "budget.seconds=1.005") as trainer:
            look = trainer.stop_conditions.check_clock
            trainer.stop_conditions.check_clock = lambda *args: (looks.append(comm.rank), look(*args))
            trainer.run()
            return trainer.position.step, trainer.position.epoch

    (steps, epochs), _ = run_virtual(body, 2, compute=Constant(STEP_S))
    assert steps == 101
    assert looks.count(0) <= epochs + 12, "every epoch ends with a meeting, too"


def test_the_first_limit_ends_the_run(tmp_path):
    def steps(*budget):
        folder = tmp_path / budget[0]
        run_virtual(lambda comm: tiny.run(comm, folder, "schedule=none", *budget), 1, compute=Constant(STEP_S))
        return read_evaluations(folder / "run")[-1].step

    assert steps("epochs=1", "budget.steps=40") == 23
    assert steps("epochs=2", "budget.samples=100", "budget.seconds=0.05") == 5
    assert steps("epochs=none", "budget.samples=100", "budget.steps=20", "budget.seconds=0.3") == 7


@some
@pytest.mark.sizes(2)
def test_evaluations_inside_epochs_change_nothing_else(ranks, shared_tmp_path, name):
    options = (f"strategy={name}", "budget.samples=400", "eval_every=2")
    often = (*options, "eval_every_samples=100")

    def body(comm):
        return _run(comm, shared_tmp_path / "plain", *options), _run(comm, shared_tmp_path / "often", *often)

    for (plain, tensors), (summary, others) in ranks(body):
        assert summary.samples == plain.samples
        if name == "allreduce":
            assert plain.metrics == summary.metrics
            assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))
    assert len(read_evaluations(shared_tmp_path / "plain" / "run")) == 1
    found = [evaluation.samples for evaluation in read_evaluations(shared_tmp_path / "often" / "run")]
    batch = 16 * summary.workers
    assert [samples // 100 for samples in found] == [1, 2, 3, 4]
    assert all(samples % 100 < batch for samples in found)


@some
def test_a_resumed_run_ends_where_the_uninterrupted_one_ends(tmp_path, name):
    """What was done before counts."""
    options = [f"strategy={name}", "budget.samples=500", "budget.seconds=0.4", "eval_every_samples=90"]
    options += ["checkpoint.every_steps=10"]
    expected = run_virtual(lambda comm: _run(comm, tmp_path, *options), 3, compute=Constant(STEP_S))
    evaluations = [evaluation.samples for evaluation in read_evaluations(tmp_path / "run")]
    path = tmp_path / "run" / "checkpoints" / "step-00000010"
    found = run_virtual(lambda comm: _run(comm, tmp_path, *options, resume=path), 3, compute=Constant(STEP_S))
    assert [evaluation.samples for evaluation in read_evaluations(tmp_path / "run")] == evaluations
    for (summary, tensors), (resumed, others) in zip(expected, found, strict=True):
        assert resumed.samples == summary.samples
        if name == "allreduce":
            assert (resumed.sha256, resumed.metrics) == (summary.sha256, summary.metrics)
            assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))
    assert resumed.wall_s == pytest.approx(summary.wall_s, abs=2 * STEP_S)


def test_a_budget_counts_samples_of_another_number_of_ranks_before(tmp_path):
    options = ("budget.samples=700", "checkpoint.every_steps=5")
    run_virtual(lambda comm: _run(comm, tmp_path, *options, "budget.steps=10"), 4)
    path = checkpoint.latest(tmp_path / "run" / "checkpoints")
    run_virtual(lambda comm: _run(comm, tmp_path, *options, resume=path), 2)
    last = read_evaluations(tmp_path / "run")[-1]
    at_ten = N_SAMPLES + 4 * 64  # six steps of 64 samples were the first epoch
    steps = -(-(700 - at_ten) // 32)
    assert (last.epoch, last.step, last.samples) == (1, 10 + steps, at_ten + steps * 32)


def test_a_run_that_is_resumed_at_its_end_is_evaluated_once(tmp_path):
    options = ("budget.steps=10", "checkpoint.every_steps=5", "checkpoint.keep=3")
    first, _ = run_virtual(lambda comm: _run(comm, tmp_path, *options), 2)[0]
    checkpoints = tmp_path / "run" / "checkpoints"
    again = lambda comm: _run(comm, tmp_path, *options, resume=checkpoints / "step-00000010")  # noqa: E731
    assert run_virtual(again, 2)[0][0].metrics == first.metrics
    assert [evaluation.step for evaluation in read_evaluations(tmp_path / "run")] == [10]
    shorter = (*options, "budget.steps=4")
    shutil.rmtree(checkpoints / "step-00000010")
    run_virtual(lambda comm: _run(comm, tmp_path, *shorter, resume=checkpoints / "step-00000005"), 2)
    assert [evaluation.step for evaluation in read_evaluations(tmp_path / "run")] == [5]


@pytest.mark.parametrize(
    ("budget", "total"), [("budget.samples=500", 500), ("budget.steps=16", 16 * 32), ("budget.seconds=0.155", None)]
)
def test_progress_goes_to_the_end_of_the_budget(tmp_path, budget, total):
    shown = []
    options = (budget, "log_every=3", "eval_every_samples=200")
    summary, _ = run_virtual(
        lambda comm: _run(comm, tmp_path, *options, report=shown.append), 2, compute=Constant(STEP_S)
    )[0]
    *before, last = shown
    assert last.ended and not any(progress.ended for progress in before)
    assert last.samples == last.total_samples == summary.samples
    assert last.metrics == summary.metrics
    assert [p.samples for p in shown] == sorted(p.samples for p in shown)
    assert all(p.epochs is None and p.samples <= p.total_samples for p in shown)
    if total is not None:
        assert all(abs(progress.total_samples - total) <= 32 for progress in before)
    else:
        assert abs(before[-1].total_samples - summary.samples) < 100


CLOCKS = """
import os, signal
import hpcdist as hd
from hpcdist.config.job import JobConfig
from hpcdist.train.stop_conditions import StopConditions
from hpcdist.train.resume import Position

comm = hd.init(deadline_s=60).apart()
conditions = StopConditions(JobConfig(epochs="none", budget={"seconds": 20}), comm, Position(), 1000)
conditions.check_clock([5.0, 1.0][comm.rank], steps=1)
if comm.rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
conditions.check_clock(2.0, steps=1)
print(conditions.ended, conditions.steps)
"""


@survivable
def test_the_next_ranks_clock_may_be_behind_that_of_the_dead_one(tmp_path):
    done = run(tmp_path, CLOCKS, 2, options=ULFM)
    assert done.stdout.split() == ["False", "8"], done.stderr


# --- settings ---------------------------------------------------------------------------------------------------------
ONE_CYCLE = {"name": "OneCycleLR", "max_lr": 0.1, "total_steps": 90}


@each(
    "case",
    [
        ({}, 1),
        ({"budget": {"steps": 3}}, None),
        ({"budget": {"steps": 3}, "epochs": 4}, 4),
        ({"budget": {"seconds": 3}, "epochs": "none"}, None),
        ({"budget": {"samples": "none"}}, 1),
        ({"budget": {"steps": 90}, "schedule": {**ONE_CYCLE, "per": "step"}}, None),
        ({"budget": {"samples": 900}, "epochs": 90, "schedule": ONE_CYCLE}, 90),
    ],
)
def test_a_budget_takes_the_place_of_one_epoch(case):
    values, epochs = case
    config = JobConfig(**values)
    assert config.epochs == JobConfig(**config.model_dump()).epochs == epochs


@each(
    "case",
    [
        ({"epochs": "none"}, "epochs must be given without a budget; got none. Give it, or budget.samples"),
        ({"budget": {"samples": 0}}, "budget.samples must be greater than or equal to 1; got 0. Samples"),
        ({"budget": {"seconds": 0}}, "budget.seconds must be greater than 0; got 0"),
        ({"budget": {"hours": 1}}, "budget setting must be one of samples, seconds, steps; got 'hours'"),
        ({"eval_every_samples": 0}, "eval_every_samples must be greater than or equal to 1; got 0"),
        ({"budget": {"steps": 91}, "schedule": {**ONE_CYCLE, "per": "step"}},
         "budget.steps must be at most 90 with OneCycleLR, which has rates for so many steps; got 91."),
        ({"budget": {"samples": 900}, "schedule": {**ONE_CYCLE, "per": "step"}},
         "budget.steps must be at most 90 with OneCycleLR, .*; got none. Give it"),
        ({"budget": {"steps": 9}, "schedule": ONE_CYCLE},
         "epochs must be at most 90 with OneCycleLR, which has rates for so many epochs; got none."),
    ],
)  # fmt: skip
def test_bad_budgets_are_refused(case):
    values, expected = case
    with pytest.raises(ConfigError, match=f"^{expected}"):
        JobConfig(**values)


def test_seconds_on_ranks_whose_steps_take_none_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="budget.seconds must be set only if steps take time; got 2, and virtual"):
        run_virtual(lambda comm: _run(comm, tmp_path, "budget.seconds=2"), 2)


def test_a_users_budget_replaces_the_epochs_of_the_job(tmp_path):
    file = tmp_path / "job.py"
    file.write_text("from train.tiny import job\n")
    toml = tmp_path / "job.toml"
    toml.write_text("epochs = 5\n")

    def epochs(*overrides: str, settings: Path | None = None) -> int | None:
        return specify(file, settings, overrides)[1].epochs

    assert epochs() == 3
    assert epochs("budget.samples=900") is None
    assert epochs("budget.samples=none") == 3
    assert epochs("budget.samples=900", "epochs=2") == 2
    assert epochs("budget.samples=900", settings=toml) == 5
