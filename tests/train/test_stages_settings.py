"""Settings of models in stages: what is refused, and comparisons and simulations of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from harness.cases import each
from hpcdist.comm.virtual import run_virtual
from hpcdist.config.job import JobConfig
from hpcdist.config.merge import load
from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.records import load_summary
from hpcdist.tools.compare.comparison import ComparedRuns
from hpcdist.tools.compare.experiment import Comparison, Sweep
from hpcdist.tools.compare.plan import groups, plan
from hpcdist.tools.compare.sweep import SweptRuns
from hpcdist.tools.compare.trials import Trials
from hpcdist.tools.simulate.cluster import ClusterConfig
from hpcdist.tools.simulate.launcher import Simulation, VirtualLauncher
from hpcdist.tools.simulate.step_time import on_cluster
from hpcdist.train.planning import rehearse
from hpcdist.train.runs import specify
from train import staged

JOB = """
import dataclasses
from train import staged

job = dataclasses.replace(staged.job, defaults={**staged.job.defaults, "data": {"path": "digits.h5"}})
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("staged_job.py").write_text(JOB)
    return tmp_path


@each(
    "case",
    [
        ({"stages": 0}, "parallel.stages must be greater than or equal to 1; got 0. Ranks that hold one whole"),
        ({"stages": 2, "cut": (3, 3, 2)}, "parallel.cut must be 2 numbers of layers, .* 2 stages; got 3, 3, 2. Change"),
        ({"stages": 2, "chunks": 2, "cut": (8, 0, 1, 1)}, "4 numbers of layers, .* 2 stages times 2 chunks; got 8, 0"),
        ({"stages": 2, "micro_batches": 33}, "parallel.micro_batches must be at most batch_size, 32; got 33. Each has"),
        ({"stags": 2}, "parallel setting must be one of chunks, .*; got 'stags'. Did you mean 'stages'"),
        ({"stages": 2, "cut": "fast"}, "parallel.cut must be 'measured' or must be an array; got 'fast'. Layers of"),
    ],
)
def test_settings_that_break_their_rules_are_refused(case):
    parallel, message = case
    with pytest.raises(ConfigError, match=message):
        JobConfig(parallel=parallel)


@each(
    "case",
    [
        (["stages=9"], "stages must be 1 to the model's number of layers, 8; got 9"),
        (["stages=2", "cut=[3,4]"], "cut must be numbers of layers, .* whose sum is the model's 8; got 3, 4"),
        (["stages=2", "chunks=2"], "chunks must be 1 with the schedule one_f_one_b; got 2. Take the schedule"),
        (["stages=2", "schedule=1f1b"], "schedule must be one of gpipe, .*; got '1f1b'"),
    ],
)
def test_what_does_not_suit_the_model_is_refused_before_a_run_begins(case):
    settings, message = case
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        specify(Path("staged_job.py"), None, [f"parallel.{setting}" for setting in settings])


def test_ranks_that_make_no_whole_replicas_are_refused_before_a_run_begins():
    _, config = specify(Path("staged_job.py"), None, ["parallel.stages=4", "strategy=softsync"])
    rehearse(config, 12)
    with pytest.raises(ConfigError, match="stages must divide the number of ranks, 10; got 4. Start 8 or 12 ranks"):
        rehearse(config, 10)
    _, config = specify(Path("staged_job.py"), None, ["parallel.stages=4", "strategy=softsync", "strategy.servers=2"])
    with pytest.raises(ConfigError, match="servers must .*; got 2"):  # and 2 replicas, of which none is a worker
        rehearse(config, 8)


@each(
    "case",
    [
        (staged.job, "cut=[1,7]", "cut must give each rank a layer with parameters .*; got 1,7, .* rank 0 has"),
        (replace(staged.job, model=lambda: nn.Linear(64, 10)), "cut=none",
         "model in stages must be an nn.Sequential, a list of layers or .*; got Lin"),
    ],
)  # fmt: skip
def test_a_model_that_can_not_be_cut_so_is_refused(tmp_path, case):
    job, setting, message = case
    with pytest.raises(ConfigError, match=message):
        run_virtual(lambda comm: staged.run(comm, tmp_path, "parallel.stages=2", f"parallel.{setting}", job=job), 2)


# --- comparisons ------------------------------------------------------------------------------------------------------
DECLARED = Comparison(
    job="job.py", strategies=("gossip_pull",), ranks=(4, 8), metric="accuracy", settings=("parallel.stages=4",), seeds=1
)


def test_controls_have_the_batch_of_all_replicas_and_a_whole_model():
    found = {(cell.name, cell.ranks): cell for cell in groups(DECLARED, 16, 2, stages=4)}
    assert {key: cell.samples for key, cell in found.items() if "averaged" not in key[0]} == {
        ("gossip_pull", 4): 32, ("gossip_pull", 8): 64, ("serial, batch 16", 1): 32, ("serial, batch 32", 1): 64,
    }  # fmt: skip
    whole = [run for run in plan(DECLARED, list(found.values())) if run.kind == "serial"]
    settings = ("parallel.stages=1", "parallel.chunks=1", "parallel.cut=none")
    assert len(whole) == 4 and all(set(settings) <= set(run.overrides) for run in whole)


def test_a_sweep_over_stages_counts_the_samples_of_replicas(tmp_path):
    declared = Sweep(
        job="staged_job.py", strategy="allreduce", over=("parallel.stages=1,2,4",), trials=3, ranks=4, sampler="grid",
        metric="accuracy", budget={"steps": 20}, evaluations=20,
    )  # fmt: skip
    trials = Trials(tmp_path / "sweep", declared)
    runs = [trials.run(0, 0, (f"parallel.stages={stages}",)) for stages in (1, 2, 4)]
    every = [load({}, None, run.overrides)["eval_every_samples"] for run in runs]
    assert SweptRuns(declared, tmp_path / "sweep") and every == [64, 32, 16]


def test_a_simulation_has_stages(tmp_path):
    described = {"network": "1us,100Gbit/s", "compute": "20ms"}
    declared = on_cluster(
        replace(DECLARED, job="staged_job.py", ranks=(8,), budget={"steps": 6}), ClusterConfig(**described), tmp_path
    )
    comparison = ComparedRuns(declared, tmp_path / "it")
    run = next(run for run in comparison.plan if run.kind == "strategy")
    VirtualLauncher(Simulation.of(declared)).run(run, Path("made"))
    summary = load_summary("made")
    assert (summary.stages, summary.workers, summary.samples) == (4, 2, 6 * 32)
    assert summary.bubbles == pytest.approx([3 / 7] * 4, rel=0.1)
    assert summary.wall_s == pytest.approx(6 * 0.02 / 4 * 7 / 4, rel=0.1)
    settings = json.loads(Path("made/run.json").read_text())["settings"]["parallel"]
    assert (settings["stages"], settings["micro_batches"]) == (4, 4)
