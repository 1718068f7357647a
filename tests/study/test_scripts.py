"""Scripts and functions with their own training loop, compared, simulated and swept over as users start them."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

import hpcdist as hd
from comm.jobs_here import run
from harness.cases import each
from harness.launch import IMPORTS, find_mpirun, launch_environment
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import ConfigError
from hpcdist.records import load_run, load_summary, read_evaluations
from hpcdist.session.run import PlannedLoop
from hpcdist.session.world import start_planned
from hpcdist.tools import cli
from hpcdist.tools.compare import run_all
from hpcdist.tools.compare.script import read_job
from hpcdist.tools.report import read_runs
from hpcdist.tools.runs import Run

SCRIPT = """
import argparse, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import hpcdist as hd

def train(seed=0, lr=0.05, run=None, log=True, strategy=None, then="pass", **options):
    hd.init(run=run)
    torch.manual_seed(seed)
    x = torch.randn(64, 4)
    y = x.sum(1, keepdim=True)
    model = torch.nn.Linear(4, 1)
    optimizer = hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model, strategy, **options)
    loader = hd.shard(DataLoader(TensorDataset(x, y), 8))
    for epoch in range(2):
        for a, b in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
        exec(then)
        with hd.consensus(model):
            hd.log_metrics({"mse": hd.metric(torch.nn.functional.mse_loss(model(x), y).item())} if log else {})
    hd.finish(model)
"""
FUNCTION = f"{SCRIPT}\n\ndef fit(seed=0, lr=0.05):\n    train(seed, lr)\n"
BY_ARGUMENTS = """
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--run")
    chosen = parser.parse_args()
    train(chosen.seed, chosen.lr, chosen.run)
    print("rank", hd.rank(), "of", hd.size())
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_all, "find_spec", lambda name: None)  # no report: it takes seconds
    with launch_environment(IMPORTS) as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
    Path("train.py").write_text(SCRIPT + BY_ARGUMENTS)
    Path("job.py").write_text("job = None")
    return tmp_path


def hpcdist(*arguments: object) -> int:
    return cli._run([*map(str, arguments)], True)


def script(end: str) -> Path:
    path = Path("other.py")
    path.write_text(f"{SCRIPT}\n{end}\n")
    return path


# --- what is a script -------------------------------------------------------------------------------------------------
@each(
    "case",
    [
        ("job = Job(...)", False),
        ("from digits import job", False),
        ("if fast:\n    job = Job(...)\nimport hpcdist", False),
        ("import hpcdist as hd\nhd.init()", True),
        ("from hpcdist.hf import Trainer\n\ndef main():\n    job = 3", True),
    ],
)
def test_a_file_that_defines_job_is_a_jobs_and_another_that_imports_hpcdist_a_script(case, tmp_path):
    text, expected = case
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "f.py").write_text("def train(seed): pass")
    words = [
        read_job(job, ["--fast"] if expected else None)[2] for job in (tmp_path / "a.py", f"{tmp_path}/f.py:train")
    ]
    assert words == [("--fast",) if expected else None, ("--fast",) if expected else ()]


@each(
    "case",
    [
        (("compare", "job.py", "--", "--lr", "1"), "ARGS must be omitted with a file that defines a job"),
        (("compare", "no.py"), "job must be a Python file; got no.py, which does not exist"),
        (("compare", "neither.py"), "or a script that imports hpcdist; got neither.py, which is neither"),
        (("compare", "wrong.py"), "job must be a file of Python; got wrong.py: "),
        (("compare", "train.py:fit"), "job must be defined in train.py, which has train; got 'fit'"),
        (("compare", "train.py", "--seeds", "2"), "ARGS must include seed, otherwise all runs would be"),
        (("compare", "train.py", "--", "{rate}"), "ARGS must be of seed, strategy, run; got rate"),
        (("compare", "train.py", "--", "--ckpt-dir=kept"), "got --ckpt-dir kept. Write --ckpt-dir {run}/checkpoints."),
        (("compare", "train.py", "--set", "epochs=1"), "--set must be omitted with a script; got"),
        (("compare", "train.py", "--budget", "steps=1"), "--budget must be omitted with a script"),
        (("compare", "train.py", "--tune", "2"), "--tune must be omitted with a script"),
        (("compare", "train.py", "--rate", "allreduce=1"), "--rate must be omitted with a script"),
        (("compare", "train.py", "--strategies", "softsync:split=1"), "strategy.* splits"),
        (("simulate", "train.py"), "--compute must be a time with a script, whose step can't be measured before"),
        (("sweep", "train.py", "--over", "lr=1,2", "--", "--lr", "{lr}"), "--target must be given, and --pruner"),
        (("sweep", "train.py", "--over", "lr=1,2", "--target", "mse=1"), "ARGS must include lr, otherwise"),
        (("sweep", "train.py", "--over", "strategy.speling=1,2", "--target", "mse=1"), "speling"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name_before_anything_runs(case, capsys):
    arguments, message = case
    Path("neither.py").write_text("x = 1")
    Path("wrong.py").write_text("import hpcdist as")
    assert hpcdist(*arguments) == 1
    assert message.replace(".*", "").split(" splits")[0] in capsys.readouterr().err and not Path("runs").exists()


def test_arguments_of_a_script_without_the_hyphens_before_them_are_explained(capsys):
    for command in ("compare", "simulate", "sweep"):
        assert hpcdist(command, "train.py", "--strategies", "allreduce", "--lr", "1") == 2
        said = capsys.readouterr().err
        assert "arguments of a script follow --: train.py --ranks 2 -- --epochs 3" in " ".join(said.split()), said
    assert hpcdist("compare", "train.py", "--bogus", "--", "--lr", "1") == 2
    assert "follow --" not in capsys.readouterr().err


def test_a_function_must_be_in_a_file():
    with pytest.raises(ConfigError, match="or a function at the top level of a file; got a function"):
        hd.compare(lambda: None)


# --- real ranks -------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
def test_a_script_is_compared_as_it_would_run_by_hand(here, capsys):
    asked = ["--strategies", "allreduce,gossip_pull", "--seeds", "2", "--target", "mse=0.5", "--output", "out"]
    assert hpcdist("compare", "train.py", *asked, "--", "--lr", "0.1", "--seed", "{seed}") == 0
    out, said = capsys.readouterr()
    assert "train.py sets its batch size and its end: runs are not cut, and there are no serial controls" in said
    assert "mse" in out and "to 0.5" in out and "6 of 6" in said, "gossip_pull on one rank is allreduce"
    frame = read_runs("out")
    assert sorted(zip(frame["name"], frame["ranks"], frame["seed"])) == [
        (name, ranks, seed) for name in ("allreduce", "gossip_pull") for ranks in (1, 2) for seed in (0, 1)
    ]
    assert load_run("out/runs/gossip_pull-r2-s1").settings["strategy"]["name"] == "gossip_pull"
    assert Run("out/runs/allreduce-r2-s1").outcome == "ended"
    text = f"{SCRIPT}\ntrain(seed=1, lr=0.1, run='hand')"
    assert run(here, text, 2).returncode == 0
    hand, made = load_summary("hand"), load_summary("out/runs/allreduce-r2-s1")
    assert (hand.sha256, hand.metrics, hand.seed) == (made.sha256, made.metrics, made.seed)
    assert [one.metrics for one in read_evaluations("hand")] == [one.metrics for one in read_evaluations(
        "out/runs/allreduce-r2-s1")]  # fmt: skip

    shutil.rmtree("out/runs/gossip_pull-r2-s0")
    assert hpcdist("compare", "--output", "out") == 0
    assert "5 of 6 runs are there already" in capsys.readouterr().err
    for command in (("runs", "--in", "out"), ("report", "out"), ("watch", "out", "--once")):
        assert hpcdist(*command) == 0
    assert hpcdist("compare", "train.py", *asked, "--", "--lr", "0.2", "--seed", "{seed}") == 1
    assert "where others are: arguments: " in capsys.readouterr().err


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
def test_a_function_is_compared_and_what_fails_says_why(here, capsys):
    Path("own.py").write_text(FUNCTION)
    spec = importlib.util.spec_from_file_location("own", here / "own.py")
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    found = hd.compare(own.fit, ranks=[2], seeds=2, controls=False, output="out")
    assert not found.failed and [load_summary(found.folder / run.folder).seed for run in found.plan] == [0, 1]
    capsys.readouterr()
    early = script("train(then='if hd.rank() == 1: sys.exit()')")
    assert hpcdist("compare", early, "--ranks", "2", "--output", "early") == 1
    assert "FAILED: hpcdist: rank 0 waited" in capsys.readouterr().err
    assert "rank 1: in exit on world" in Path("early/runs/allreduce-r2-s0/failure.txt").read_text()


# --- virtual ranks ----------------------------------------------------------------------------------------------------
def simulated(path: Path | str, *more: object) -> tuple[int, Path]:
    status = hpcdist("simulate", path, "--compute", "10ms", "--ranks", "4", "--output", "out", *more)
    return status, Path("out")


def test_a_script_is_simulated_each_step_takes_its_time_and_one_rank_is_the_control(capsys):
    status, out = simulated("train.py", "--strategies", "allreduce,softsync:splits=1", "--target", "mse=0.5")
    said = capsys.readouterr().err
    assert status == 0 and "steps: 10ms (0.01 s), for any batch size" in said and "share" not in said
    alone, four = load_summary(out / "runs/serial-r1-s0"), load_summary(out / "runs/allreduce-r4-s0")
    assert alone.wall_s == pytest.approx(16 * 0.01) and 4 * 0.01 < four.wall_s < 0.1 and four.samples == 128
    served = load_run(out / "runs/softsync-splits=1-r4-s0")
    assert served.settings["strategy"] == {**served.settings["strategy"], "name": "softsync", "splits": 1}
    assert served.virtual["compute"]["seconds"] == 0.01 and served.job.path == "train.py"
    log = (out / "runs/allreduce-r4-s0/output.log").read_text()
    assert [f"rank {rank} of 4" in log for rank in range(4)] == [True] * 4
    shutil.rmtree(out / "runs/allreduce-r4-s0")
    assert hpcdist("simulate", "--output", "out") == 0
    assert load_summary(out / "runs/allreduce-r4-s0").sha256 == four.sha256, "the same run, to the bit"
    assert "2 of 3 runs are there already" in capsys.readouterr().err


@each(
    "case",
    [
        ("train(strategy='gossip_pull')", "strategy of DistributedOptimizer must be 'allreduce' in this run of a"),
        ("train(compression='fp16')", "compression of DistributedOptimizer must be 'topk' in this run of a comparison"),
        (
            "hd.rank",
            "other.py must call hpcdist.init() and hpcdist.DistributedOptimizer(...) to be a run; it ended without",
        ),
        ("hd.finish = id\ntrain()", "other.py must call hpcdist.finish(model) to be a run; it ended without"),
        ("train(then='sys.exit(3)')", "other.py must end with status 0; got sys.exit(3)"),
        ("train(then='if hd.rank() == 1: sys.exit()')", "no virtual rank can continue"),
        ("train(then='raise ValueError(7)')", "ValueError: 7"),
        ("train(then='hd.save(\"kept\", optimizer=optimizer)')", "checkpoints must be in the folder of a run that a"),
        ("hd.compare('other.py')", "hpcdist.compare must not be called by the file that it trains"),
    ],
)
def test_a_run_that_fails_says_why_in_a_sentence(case, capsys):
    end, message = case
    shutil.rmtree("out", ignore_errors=True)
    status, out = simulated(script(end), "--no-controls", "--strategies", "allreduce:compression=topk")
    assert status == 1 and message in capsys.readouterr().err
    assert message in next(out.glob("runs/*/failure.txt")).read_text()


def test_a_script_may_name_the_runs_own_strategy_and_folder_and_a_run_without_metrics_is_told(capsys):
    then = "f'hd.save(\"{sys.argv[2]}/checkpoints\", o=optimizer)'"
    end = f"train(strategy=sys.argv[1], run='mine', log=False, then={then})"
    status, out = simulated(script(end), "--no-controls", "--", "{strategy}", "{run}")
    assert status == 0 and "other.py logs no metric (hpcdist.log_metrics)" in capsys.readouterr().err
    assert (out / "runs/allreduce-r4-s0/checkpoints").exists() and not Path("mine").exists()
    assert "hpcdist.init(run='mine')" in (out / "runs/allreduce-r4-s0/output.log").read_text()


def test_a_sweep_fills_arguments_and_options_of_the_strategy(capsys):
    asked = "--sampler grid --strategy softsync --ranks 3 --virtual --compute 1ms --jobs 1".split()
    asked += ["--over", "lr=0.01,0.1", "--over", "strategy.splits=1,2", "--target", "mse=0.1", "--output", "out"]
    assert hpcdist("sweep", "train.py", *asked, "--", "--lr", "{lr}") == 0
    trials = json.loads(Path("out/sweep.json").read_text())["trials"]
    found = {tuple(one["settings"].values()): load_run(Path("out") / one["folders"][0]).settings for one in trials}
    assert {lr: settings["optimizer"]["lr"] for (lr, _), settings in found.items()} == {
        "0.01": 0.01,
        "0.1": 0.1,
    }
    assert all(settings["strategy"]["splits"] == int(splits) for (_, splits), settings in found.items())
    assert [one["state"] for one in trials] == ["complete"] * 4 and trials[0]["value"] > trials[3]["value"]


def test_init_returns_the_virtual_ranks_communicator_and_the_plan_is_the_default_strategy(tmp_path):
    def body(comm):
        start_planned(comm, PlannedLoop("a.py", str(tmp_path / "run"), "local_sgd", {"period": 2}))
        assert hd.init() is comm
        model = torch.nn.Linear(1, 1)
        optimizer = hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
        assert type(optimizer.strategy).__name__ == "LocalSGD" and optimizer.strategy.config.period == 2

    run_virtual(body, 2)
