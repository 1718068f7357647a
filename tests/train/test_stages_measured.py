"""Jobs whose stages are cut by measured times of layers: the plan's cut, noted in the run, kept by a resumed one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.cases import each
from hpcdist.comm.virtual import run_virtual
from hpcdist.config.job import JobConfig
from hpcdist.errors import ConfigError
from hpcdist.parallel.cost import LayerCost, measure
from hpcdist.parallel.plan import predict
from hpcdist.records import load_summary
from hpcdist.train import planning, runs
from hpcdist.train.planning import measure_layers
from train import staged

MEASURED = ("parallel.stages=2", "parallel.micro_batches=4", "parallel.cut=measured")
JOB = """
import dataclasses
from train import staged, tiny

job = dataclasses.replace(staged.job, model=lambda: staged.model(), data=tiny.job.data)
"""


def with_slow(layer: int):
    """What measures that one layer is slow."""
    costs = [LayerCost(str(n), 0.1 if n == layer else 0.001, 0.001, 0.001, 8 * (n % 2), 8, 8) for n in range(8)]
    return lambda *given, **options: costs


class Slow(nn.Module):
    """A layer of few parameters and much work."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return x * (self.scale + 0 * (torch.ones(300, 300) @ torch.ones(300, 300) @ torch.ones(300, 300)).mean())


def unequal() -> nn.Sequential:
    """Most parameters are in the first layers, most work is in the last but one."""
    layers = [staged.Doubled(), nn.Linear(64, 400), nn.Linear(400, 8), nn.Tanh(), nn.Linear(8, 8), Slow()]
    return nn.Sequential(*layers, nn.Linear(8, 10)).double()


@pytest.mark.computes
@pytest.mark.sizes(2)
def test_a_slow_layer_has_a_stage_where_the_plan_gives_it_one(ranks, shared_tmp_path, monkeypatch):
    found: list[LayerCost] = []

    def noted(*given, **options):
        found[:] = measure(*given, **options)
        return found

    monkeypatch.setattr(planning, "measure", noted)
    job, short = replace(staged.job, model=unequal), "budget.steps=3"
    summaries = ranks(lambda comm: staged.run(comm, shared_tmp_path / "it", *MEASURED, short, job=job)[0])
    plain = ranks(lambda comm: staged.run(comm, shared_tmp_path / "plain", *MEASURED[:2], short, job=job)[0])
    assert summaries[0].cut == summaries[1].cut == load_summary(shared_tmp_path / "it/run").cut
    assert plain[0].cut == [2, 5] and summaries[0].cut[0] > 3
    assert summaries[0].metrics == pytest.approx(plain[0].metrics, abs=1e-12)
    if found:  # on the rank that has measured
        assert summaries[0].cut == list(predict(found, 2, micro_batches=4).cut.sizes)


def test_a_resumed_run_keeps_its_cut_to_the_bit(tmp_path, monkeypatch):
    """Another one that is measured is not asked for; without a checkpoint, or on other stages, it is."""
    monkeypatch.chdir(tmp_path)
    Path("it.py").write_text(JOB)
    saving = ("checkpoint.every_steps=4", "checkpoint.keep=9", "data.path=digits.h5")

    def run(output, *settings, stages=2, resume=False):
        words = (*saving, "parallel.cut=measured", f"parallel.stages={stages}", *settings)
        return run_virtual(
            lambda comm: runs.train(comm, Path("it.py"), None, words, Path(output), resume=resume)[1], stages
        )[0]

    monkeypatch.setattr(planning, "measure", with_slow(7))
    whole = run("whole", "budget.steps=8")
    run("it", "budget.steps=4", resume=True)
    monkeypatch.setattr(planning, "measure", with_slow(1))
    resumed = run("it", "budget.steps=8", resume=True)
    assert (whole.cut, resumed.cut, whole.sha256) == ([7, 1], [7, 1], resumed.sha256)
    starts = json.loads(Path("it/run.json").read_text())
    assert "[7, 1]" in json.dumps(starts)
    deeper = run("it", "budget.steps=9", stages=4, resume=True)
    assert deeper.cut == [2, 2, 2, 2]


def test_measuring_changes_no_random_state(tmp_path):
    config = JobConfig(data={"path": str(tmp_path / "digits.h5")}, seed=3)
    before = torch.get_rng_state()
    costs = measure_layers(staged.job, config, torch.device("cpu"))
    assert len(costs) == 8 and torch.equal(torch.get_rng_state(), before)


def test_one_stage_has_nothing_to_be_cut():
    assert JobConfig(parallel={"stages": 2, "cut": "none"}).parallel.cut is None
    assert not JobConfig(parallel={"cut": "measured"}).parallel.measures


@each(
    "case",
    [
        ({"name": "SGD", "lr": 0.1}, 2), ({"name": "SGD", "lr": 0.1, "momentum": 0.9}, 3), ({"name": "AdamW"}, 4),
        ({"name": "SparseAdam"}, 2), ({"name": "LBFGS"}, 4),
    ],
)  # fmt: skip
def test_a_plan_counts_weights_gradients_and_the_optimisers_state(case):
    optimizer, number = case
    assert planning.copies(JobConfig(optimizer=optimizer)) == number


def test_too_few_layers_with_parameters_are_refused_on_all_ranks(tmp_path):
    job = replace(staged.job, model=lambda: nn.Sequential(staged.Doubled(), nn.Linear(64, 10).double()))
    message = "stages must be 1 to the model's number of layers with parameters, 1; got 2. Take fewer"

    def body(comm):
        with pytest.raises(ConfigError, match=message):
            staged.run(comm, tmp_path, *MEASURED, job=job)
        return True

    assert run_virtual(body, 2) == [True, True]
