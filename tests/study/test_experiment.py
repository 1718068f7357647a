"""`hpcdist.compare` and `hpcdist.simulate`: what they return, and that a command goes on with their folders."""

from __future__ import annotations

from pathlib import Path

import pytest

import hpcdist as hd
from harness.cases import each
from hpcdist.errors import ConfigError
from hpcdist.tools.compare import functions
from study.pretended import PretendedRuns
from train import tiny

TINY = Path(__file__).parents[1] / "train" / "tiny.py"
FEW = {"budget": {"steps": 2}, "controls": False, "evaluations": 1}


def test_a_simulation_is_a_table_its_runs_figures_and_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = {"ranks": [2], "compute": "1ms", "workers": 1, **FEW}
    found = hd.simulate(TINY, ["allreduce", "gossip_pull"], **asked)
    assert not found.failed and found.folder == Path("runs/simulate-tiny")
    assert {"allreduce", "gossip_pull"} <= set(found.table["name"]) and len(found.runs) == len(found.table) == 2
    assert repr(found).startswith("ComparedRuns in runs/simulate-tiny\n") and "gossip_pull" in repr(found)
    assert found.figures and "<table" in found._repr_html_() and found.verdict
    assert found.report("page") == Path("page/index.html") and "gossip_pull" in Path("page/index.html").read_text()
    few = "With 1 seed differences in results can't be told from noise; that takes 3 seeds or more"
    assert few in capsys.readouterr().err
    hd.simulate(TINY, ["allreduce", "gossip_pull"], **asked)
    assert "2 of 2 runs are there already" in capsys.readouterr().err


def test_a_comparison_is_made_by_a_launcher(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(functions, "mpi_launcher", lambda *given: PretendedRuns())
    found = hd.compare(TINY, ranks=[1], seeds=1, output="out", **FEW)
    assert not found.failed and list(found.runs["name"]) == ["allreduce"] and Path("out/comparison.json").exists()


def test_a_sweep_runs_on_virtual_ranks_and_options_are_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = {"ranks": 2, "virtual": True, "compute": "1ms", "sampler": "grid", "jobs": 1, "budget": {"steps": 2}}
    found = hd.sweep(TINY, {"batch_size": [8, 16], "optimizer.lr": "0.01"}, evaluations=1, **asked)
    assert not found.failed and len(found.table) == 2 and set(found.best) == {"batch_size", "optimizer.lr"}
    with pytest.raises(
        ConfigError, match="options of Sweep must be of their types, within bounds; got seeds: .*, got 0"
    ):
        hd.sweep(TINY, {"batch_size": [8]}, seeds=0)


def test_arguments_are_named_as_in_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = {"ranks": 2, "compute": "1ms", "workers": 1, **FEW, "budget": "steps=2"}  # each without a list
    assert hd.simulate(TINY, "allreduce", **one).experiment.ranks == (2,)
    with pytest.raises(ConfigError, match="arguments must be one of .*; got 'rank'. Did you mean 'ranks'?"):
        hd.simulate(TINY, ["allreduce"], rank=[2])


@each(
    "case",
    [
        (hd.compare, {"target": ("accuracy", 95)}, "target of accuracy must be a share from 0 to 1; got 95."),
        (hd.simulate, {"budget": "samples"}, "budget must be samples=N"),
        (hd.compare, {"rates": "0.1"}, "rates must be STRATEGY=RATE"),
        (hd.compare, {"settings": ["a"]}, "settings must be key=value"),
        (hd.compare, {"slurm_set": ["time_min=3"]}, "slurm must be given with slurm_set; got none. Such as slurm gen"),
        (hd.compare, {"launcher": "no-such", "output": "new"}, "launcher must start .*: launcher 'srun --mpi=pmix -n'"),
    ],
)  # fmt: skip
def test_messages_name_arguments_and_not_options(tmp_path, monkeypatch, case):
    function, options, message = case
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^{message}"):
        function(TINY, **options)


def test_a_job_that_is_no_file_is_refused():
    with pytest.raises(ConfigError, match="job must be the path of a Python file that defines `job`, or .* got a Job"):
        hd.compare(tiny.job)
    with pytest.raises(ConfigError, match="job must be the path"):
        hd.simulate(tiny.job)
