"""Runs whose gradients or parameters go to infinity: skipped steps are counted, and what can't recover ends."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from hpcdist import checkpoint
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import NonFiniteError
from hpcdist.records import load_summary, read_records
from hpcdist.tools import console
from hpcdist.tools.report import table
from hpcdist.tools.report.analysis import analyse
from hpcdist.tools.report.results import read_jobs
from strategies import problem
from train import tiny

SHOWN = ("allreduce", "parameter_server", "gossip_pull", "zero_one_adam")
SKIPPING = ("on_nonfinite=skip", "schedule=none", "clip_norm=none", "optimizer=SGD", "optimizer.lr=0.1")


def _run(folder: Path, ranks: int, factor, *overrides: str, model=None):
    """A run whose loss is multiplied by `factor(call)`; calls of all ranks count from 1."""

    def body(comm):
        calls = iter(range(1, 1000))

        def loss(outputs, targets):
            found = nn.functional.cross_entropy(outputs, targets)
            return found * factor(next(calls)) if outputs.requires_grad else found

        job = dataclasses.replace(tiny.job, loss=loss, **({} if model is None else {"model": model}))
        return tiny.run(comm, folder, *SKIPPING, *overrides, of=job)[0]

    return run_virtual(body, ranks)[0]


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


@pytest.mark.parametrize("name", ["allreduce", "parameter_server", "gossip_pull"])
def test_parameters_that_are_not_finite_end_the_run_and_no_good_checkpoint_makes_room_for_them(tmp_path, name):
    """From step 6 on gradients are of about 1e37, and finite; times a rate of 10,000 they are not."""
    flags = ("optimizer.lr=10000.0", f"strategy={name}", "checkpoint.every_steps=4", "checkpoint.keep=1")
    message = r"parameters must be finite; got NaN or infinity on rank \d after step 8: 1\.weight( and 1 more)?\. Lower"
    with pytest.raises(NonFiniteError, match=message):
        _run(tmp_path, 3, lambda call: 1.0 if call < 6 else 1e37, *flags, model=linear)
    path = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert path.name == "step-00000004"
    assert all(torch.isfinite(p).all() for rank in range(3) for p in _tensors(path, rank))
    assert not (tmp_path / "run" / "summary.json").exists()


def _tensors(path, rank):
    return [chunk.tensor for chunk in checkpoint.SavedRank(path, rank).at("params").values()]


def test_parameters_that_are_not_finite_are_not_evaluated_but_who_looks_away_is_not_told(tmp_path):
    flags = ("optimizer.lr=10000.0", "epochs=1")
    with pytest.raises(NonFiniteError, match="parameters must be finite; got NaN or infinity on rank 0 after step 12"):
        _run(tmp_path, 2, lambda call: 1.0 if call < 6 else 1e37, *flags, model=linear)
    flags = (*flags, "strategy.on_nonfinite=ignore")
    summary = _run(tmp_path, 2, lambda call: 1.0 if call < 6 else 1e37, *flags, model=linear)
    assert summary.metrics["loss"] != summary.metrics["loss"] and summary.skipped == 0


@pytest.mark.parametrize("name", SHOWN)
def test_skipped_steps_are_counted_in_the_summary(tmp_path, name, capsys):
    """Every worker skips its 3rd and its 7th step."""
    flags = (f"strategy={name}", "epochs=1", f"optimizer={problem.suited(name).__name__}")
    summary = _run(tmp_path, 3, lambda call: float("inf") if call in (3, 7) else 1.0, *flags)
    assert summary.skipped == 2 * summary.workers
    assert load_summary(tmp_path / "run").skipped == summary.skipped
    console.result(Path("it"), summary)
    shown = capsys.readouterr().out
    assert f" s, {summary.skipped} steps skipped for NaN or infinite gradients; records in it" in shown
    table.show(table.tables([analyse(job) for job in read_jobs([tmp_path])]))
    shown = capsys.readouterr().out
    assert "skipped" in shown and f" {summary.skipped}\n" in shown


def test_a_run_without_skipped_steps_says_nothing_of_them(tmp_path, capsys):
    summary = _run(tmp_path, 2, lambda call: 1.0, "epochs=1")
    console.result(Path("it"), summary)
    (shown,) = table.tables([analyse(job) for job in read_jobs([tmp_path])])
    assert "skipped" not in shown.rows[0]
    assert summary.skipped == 0 and "skipped" not in capsys.readouterr().out
    right = summary.metrics["accuracy"] * summary.test_samples
    assert summary.test_samples > 1 and right == pytest.approx(round(right)), "a share of the test set"


def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path):
    """Three in a row are one less than too many; then four come."""
    message = (
        "consecutive steps whose gradient is NaN or infinite must be fewer than max_skipped, 4; got .* up to step 15"
    )
    with pytest.raises(NonFiniteError, match=message):
        _run(tmp_path, 2, lambda call: float("nan") if call in (3, 4, 5) or call > 11 else 1.0, "max_skipped=4")
    assert [record.step for record in read_records(tmp_path / "run")[0] if record.event] == [3, 4, 5, 12, 13, 14, 15]
