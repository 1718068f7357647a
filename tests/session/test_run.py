"""A loop of one's own as a run: the files of its folder, how it ends, and what is refused."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import hpcdist as hd
from comm.jobs_here import run, write
from harness.cases import each
from harness.launch import find_mpirun
from hpcdist.comm.virtual import Constant, Network, run_virtual
from hpcdist.errors import ConfigError
from hpcdist.records import load_run, load_summary, read_evaluations, read_records
from hpcdist.session.run import LoopRun
from hpcdist.tools.report.results import read_jobs
from hpcdist.tools.runs import Run
from hpcdist.tools.watch.view import view

N, BATCH, EPOCHS = 50, 4, 3


def _loop(comm, folder, strategy, lbfgs=False):
    hd.init(comm=comm, run=folder)
    torch.manual_seed(3)
    model = torch.nn.Linear(2, 1)
    kind = torch.optim.LBFGS if lbfgs else torch.optim.SGD
    optimizer = hd.DistributedOptimizer(kind(model.parameters(), 0.01), model, strategy=strategy)
    data = TensorDataset(torch.ones(N, 2), torch.ones(N, 1))
    loader = hd.shard(DataLoader(data, BATCH))
    for epoch in range(EPOCHS):
        for x, y in loader:
            comm.compute()

            def closure():
                optimizer.zero_grad()
                loss = mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        hd.log_metrics({"accuracy": torch.tensor(0.25 * epoch), "loss": 1})
    hd.finish(model)
    hd.log_metrics({"accuracy": 0.75})
    return [p.tolist() for p in model.parameters()]


def started(folder, strategy, **options):
    return run_virtual(lambda comm: _loop(comm, folder, strategy, **options), 2)


@each("strategy", ["allreduce", "hardsync", "softsync", "gossip_pull", "diloco"])
def test_a_loop_writes_what_a_job_writes(strategy, tmp_path):
    folder = tmp_path / "runs" / strategy
    run_virtual(lambda comm: _loop(comm, folder, strategy), 3, compute=Constant(0.5))
    servers = 1 if strategy in ("hardsync", "softsync") else 0
    summary, steps = load_summary(folder), -(-N // (BATCH * (3 - servers)))
    assert (summary.strategy, summary.ranks, summary.workers) == (strategy, 3, 3 - servers)
    assert (summary.samples, summary.metrics, summary.seed) == (EPOCHS * N, {"accuracy": 0.75}, 3)
    assert summary.wall_s == pytest.approx(EPOCHS * steps * 0.5, rel=0.2)
    evaluations = read_evaluations(folder)
    assert [one.metrics["accuracy"] for one in evaluations] == [0, 0.25, 0.5, 0.75]
    assert [(one.step, one.epoch) for one in evaluations[:3]] == [(steps * n, n) for n in (1, 2, 3)]
    workers = [records for rank, records in read_records(folder).items() if rank >= servers]
    assert [len(records) for records in workers] == [EPOCHS * steps] * (3 - servers)
    assert load_run(folder).settings["strategy"]["name"] == strategy
    assert Run(folder).outcome == "ended"


@each("shards", [True, False])
def test_a_pipeline_s_run_counts_each_sample_once_and_what_stages_exchange(shards, tmp_path):
    """Two replicas of two stages. Of the last of 7 steps one replica has all samples, where they are shared out."""
    folder = tmp_path / str(shards)

    def body(comm):
        hd.init(comm=comm, run=folder)
        layers = [torch.nn.Linear(2, 8), torch.nn.Linear(8, 1)]
        model = hd.pipeline(torch.nn.Sequential(*layers), mse_loss, stages=2, cut=[1, 1], micro_batches=1)
        local = torch.optim.SGD(model.parameters(), 0.01)
        hd.DistributedOptimizer(local, model, on_nonfinite="skip", identical_batches="allow")
        loader = DataLoader(TensorDataset(torch.ones(N, 2), torch.ones(N, 1)), BATCH)
        for step, (x, y) in enumerate(hd.shard(loader) if shards else loader):
            model.step(x if step != 3 else x * torch.nan, y)
        hd.finish(model)

    run_virtual(body, 4, network=Network(0.5, 1e9))
    summary, records = load_summary(folder), read_records(folder)
    steps = 13 if shards else 26  # of both replicas
    assert (summary.samples, summary.workers, summary.stages) == (shards * N, 2, 2)
    assert (summary.skipped, sum(summary.staleness.histogram.values())) == (2, steps - 2)
    exchanged = [sum(record.stage_bytes for record in of_rank) for of_rank in records.values()]
    assert exchanged == ([1334, 1030, 1218, 1094] if shards else [2122, 1866, 2122, 1866])
    assert min(summary.bubbles) > 0.5, "nothing takes time but the network"
    (folder / "summary.json").unlink()
    watched = view("run", Run(folder, follow=True))
    assert watched.bytes_per_step == pytest.approx(summary.bytes_per_step)
    assert watched.samples == summary.samples and not any(rank.serves for rank in watched.ranks)


def test_steps_that_evaluate_closures_are_written_too(tmp_path):
    started(tmp_path, "allreduce", lbfgs=True)
    assert load_summary(tmp_path).samples == EPOCHS * N


def test_a_run_is_optional_and_changes_no_result(tmp_path):
    assert started(None, "allreduce") == started(tmp_path, "allreduce")


NOTES = """
from hpcdist.session.loggers import Logger

class Notes(Logger):
    def __init__(self, run):
        run.folder.mkdir(exist_ok=True)
        self.file = open(run.folder / "notes", "a")

    def write(self, step, values):
        print(step, *values, file=self.file)

    def close(self):
        self.file.close()
"""


def test_loggers_write_a_loop_s_figures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.py").write_text(NOTES)

    def body(comm):
        hd.init(comm=comm, run=tmp_path / "mine", log=["notes.py:Notes"])
        return _loop(comm, tmp_path / "mine", "hardsync")

    run_virtual(body, 3, compute=Constant(0.5))
    (notes,) = (tmp_path / "mine").glob("*/notes")
    lines = [line.split() for line in notes.read_text().splitlines()]
    assert [line[0] for line in lines if line[1] == "test/accuracy"][:3] == ["7", "14", "21"]
    assert "train/samples_per_second" in next(line for line in lines if line[0] == "20")


def test_no_loggers_may_be_none(tmp_path):
    run_virtual(lambda comm: hd.init(comm=comm, run=tmp_path, log=None), 1)


def test_loggers_need_a_run():
    def body(comm, **given):
        with pytest.raises(ConfigError, match="log must be a list of names, given with run, whose folder stores"):
            hd.init(comm=comm, **given)

    run_virtual(lambda comm: body(comm, log=["tensorboard"]), 1)
    run_virtual(lambda comm: body(comm, run="mine", log="tensorboard"), 1)


@each("has_run", [True, False])
def test_metrics_that_are_no_numbers_are_refused(has_run, tmp_path):
    def body(comm):
        hd.init(comm=comm, run=tmp_path if has_run else None)
        for wrong in ("much", None, torch.ones(2)):
            with pytest.raises(ConfigError, match="metrics must be numbers by their names; got .* for 'accuracy'"):
                hd.log_metrics({"accuracy": wrong})

    run_virtual(body, 1)


@each("wrong", [[1], None, 3, {"a\nb": 1}, {"": 1}, {3: 1}, {"accuracy": "3"}])
def test_other_metrics_are_refused(wrong, tmp_path):
    def body(comm):
        hd.init(comm=comm, run=tmp_path / "mine")
        with pytest.raises(ConfigError, match="metrics must (be numbers by their names|have names of one line); got"):
            hd.log_metrics(wrong)

    run_virtual(body, 1)
    (tmp_path / "mine" / ".lock").unlink(missing_ok=True)  # the loop has not ended, and the process goes on


@each("wrong", ["", " ", True, 5, b"x"])
def test_a_run_is_a_folder(wrong):
    def body(comm):
        with pytest.raises(ConfigError, match="run must be the path of a folder, None or False; got"):
            hd.init(comm=comm, run=wrong)

    run_virtual(body, 1)


def test_a_run_that_starts_again_without_its_checkpoint_is_told(tmp_path, caplog):
    started(tmp_path, "allreduce")
    (tmp_path / "summary.json").unlink()
    assert "starts again" not in caplog.text
    started(tmp_path, "allreduce")
    told = [record.getMessage() for record in caplog.records if "starts again" in record.getMessage()]
    assert len(told) == 1 and told[0].startswith(f"{tmp_path} was at step 21; it starts again at step 0")


def test_metrics_before_the_first_step_are_of_the_step_that_the_run_goes_on_from(tmp_path, caplog):
    """A second start may log before it has loaded its checkpoint."""

    def body(comm, first):
        hd.init(comm=comm, run=tmp_path)
        hd.log_metrics({"loss": 9})
        model = torch.nn.Linear(2, 1)
        optimizer = hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model)
        optimizer.strategy.steps = first
        for x, y in hd.shard(DataLoader(TensorDataset(torch.ones(N, 2), torch.ones(N, 1)), BATCH)):
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
        hd.log_metrics({"loss": 1})
        hd.finish(model)

    run_virtual(lambda comm: body(comm, 0), 2)
    (tmp_path / "summary.json").unlink()
    run_virtual(lambda comm: body(comm, 7), 2)
    found = [(one.step, one.samples, one.metrics["loss"]) for one in read_evaluations(tmp_path)]
    assert found == [(0, 0, 9), (7, N, 1), (7, N, 9), (14, 2 * N, 1)]
    assert "starts again" not in caplog.text


def test_a_new_folder_may_start_with_a_later_step(tmp_path):
    """As a run does that loads a checkpoint of another one."""

    def body(comm, folder):
        hd.init(comm=comm, run=tmp_path / folder)
        model = torch.nn.Linear(2, 1)
        optimizer = hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model)
        found = hd.load(tmp_path / "saved", optimizer=optimizer)
        for x in hd.shard(DataLoader(torch.ones(N, 2), BATCH)):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        hd.save(tmp_path / "saved", optimizer=optimizer)
        hd.finish(model)
        return found and found["step"]

    found = [run_virtual(partial(body, folder=folder), 2)[0] for folder in ("first", "second")]
    assert found == [None, 7]
    assert min(each.step for each in read_records(tmp_path / "second")[0]) == 8


@each("strategy", ["gossip_pull", "parameter_server"])
def test_a_run_that_continues_on_other_ranks_counts_each_step_once(strategy, tmp_path):
    """The first start has trained for an epoch more than its checkpoint has."""
    folder = tmp_path / strategy

    def body(comm):
        hd.init(comm=comm, run=folder)
        model = torch.nn.Linear(2, 1)
        optimizer = hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model, strategy=strategy)
        loader = hd.shard(DataLoader(TensorDataset(torch.ones(N, 2), torch.ones(N, 1)), BATCH))
        hd.load(folder / "saved", optimizer=optimizer, loader=loader)
        for epoch in range(loader.next_epoch, 2):
            for x, y in loader:
                comm.compute()
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                optimizer.step()
            if epoch == 0:
                hd.save(folder / "saved", optimizer=optimizer, loader=loader)
            hd.log_metrics({"epoch": epoch})
        hd.finish(model)

    run_virtual(body, 4, compute=Constant(0.5))
    for size in (2, 3):
        (folder / "summary.json").unlink()
        run_virtual(body, size, compute=Constant(0.5))
        summary = load_summary(folder)
        assert summary.samples == 2 * N and read_evaluations(folder)[-1].samples == 2 * N
        steps = sum(r.samples > 0 for of_rank in read_records(folder).values() for r in of_rank)
        assert sum(summary.staleness.histogram.values()) + summary.pending == steps, "one staleness for each gradient"


def test_metrics_before_the_optimiser_are_written_once_where_rank_0_serves(tmp_path):
    def body(comm):
        hd.init(comm=comm, run=tmp_path)
        hd.log_metrics({"loss": 9})
        _loop(comm, tmp_path, "hardsync")

    run_virtual(body, 3)
    found = [(one.step, one.metrics) for one in read_evaluations(tmp_path)]
    assert found[0] == (0, {"loss": 9}) and [metrics for _, metrics in found].count({"loss": 9}) == 1


def test_folders_of_other_runs_are_refused(tmp_path):
    started(tmp_path / "ended", "allreduce")
    with pytest.raises(
        ConfigError,
        match="run must be a folder in which no run has ended; got .*, where one has",
    ):
        started(tmp_path / "ended", "allreduce")
    (tmp_path / "ended" / "summary.json").unlink()
    with pytest.raises(
        ConfigError, match="run must be a folder of hardsync, or a new one; got .*, whose run with allreduce"
    ):
        started(tmp_path / "ended", "hardsync")
    record = json.loads((tmp_path / "ended" / "run.json").read_text())
    record["job"]["path"] = "other.py"
    (tmp_path / "ended" / "run.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"run must be a folder of .*, or a new one; got .* of other.py"):
        started(tmp_path / "ended", "allreduce")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run must be a folder that can be made; got .*file"):
        started(tmp_path / "file" / "mine", "allreduce")


def test_one_run_follows_another_once_that_has_ended(tmp_path):
    def body(comm):
        _loop(comm, tmp_path / "first", "allreduce")
        _loop(comm, tmp_path / "second", "hardsync")
        hd.init(comm=comm, run=tmp_path / "third")
        hd.init(comm=comm, run=tmp_path / "third")
        with pytest.raises(ConfigError, match="run must stay .*third until hpcdist.finish has ended that run; got .*4"):
            hd.init(comm=comm, run=tmp_path / "4")

    run_virtual(body, 2)
    assert [load_summary(tmp_path / name).strategy for name in ("first", "second")] == ["allreduce", "hardsync"]


def test_runs_of_a_script_with_other_arguments_have_rows_of_their_own(tmp_path, monkeypatch):
    for name, words in {"a": "--epochs 6 -v 1e-3", "b": "--epochs=8 -v -0.5", "c": "--epochs 8 -v -0.5"}.items():
        folder, seed = tmp_path / name, f"--seed={ord(name)}"
        monkeypatch.setattr(sys, "argv", ["train.py", *words.split(), seed, "--run", str(folder / "checkpoints")])
        started(folder, "allreduce")
    assert load_run(tmp_path / "b").settings["arguments"] == {"epochs": "8", "v": "-0.5", "seed": "98"}
    (job,) = read_jobs([tmp_path])
    assert [(one.name, one.run.folder.name) for one in job.runs] == [
        ("allreduce (epochs 6, v 1e-3)", "a"),
        ("allreduce (epochs 8, v -0.5)", "b"),
        ("allreduce (epochs 8, v -0.5)", "c"),
    ]


def test_arguments_are_told_from_paths_where_the_run_s_folder_is_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "6", "--fast", "--run", ".", "--saved", "./checkpoints"])
    started(Path("."), "allreduce")
    assert load_run(tmp_path).settings["arguments"] == {"epochs": "6", "fast": ""}


def test_scripts_of_a_batch_job_have_folders_of_their_own(tmp_path):
    def claimed(comm):
        return LoopRun(comm, tmp_path, of_job=True).folder

    (first,) = set(run_virtual(claimed, 2))
    assert first.parent == tmp_path
    (first / "summary.json").write_text("{}")
    assert set(run_virtual(claimed, 2)) == {tmp_path / f"{first.name}-2"}


def test_a_batch_job_s_folder_that_cannot_be_made_is_named_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="HPCDIST_RUN must be a folder that can be made; got .*file"):
        run_virtual(lambda comm: LoopRun(comm, tmp_path / "file" / "job", of_job=True), 2)


SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
import hpcdist as hd

hd.init(run={run!r})
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model, strategy="hardsync")
loader = hd.shard(DataLoader(TensorDataset(torch.ones(40, 3), torch.ones(40, 1)), 4))
found = hd.load({saved!r}, optimizer=optimizer, loader=loader)
with hd.Leaving(hd.init()) as leaving:
    for epoch in range(found["epoch"] + 1 if found else 0, 3):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        hd.log_metrics({{"epoch": epoch}})
        {then}
hd.finish(model)
"""
LEAVES = "hd.save({saved!r}, optimizer=optimizer, loader=loader, epoch=epoch); sys.exit(75)"
DIES = "hd.save({saved!r}, optimizer=optimizer, loader=loader, epoch=epoch); os.kill(os.getpid(), 9)"
FAILS = "raise OSError('no more')"


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
def test_a_run_that_is_killed_after_a_checkpoint_counts_all_steps_before_it(tmp_path):
    folder, saved = tmp_path / "mine", str(tmp_path / "saved")
    first, second = (
        run(tmp_path, "import os\n" + SCRIPT.format(run=str(folder), saved=saved, then=then.format(saved=saved)), 3)
        for then in (DIES, "pass")
    )
    assert first.returncode != 0 and second.returncode == 0, second.stderr
    ended = Run(folder)
    assert ended.summary.samples == 3 * 40 and [one.samples for one in ended.evaluations] == [40, 80, 120]
    seconds = [one.seconds for one in ended.evaluations]
    assert seconds == sorted(seconds) and ended.summary.wall_s >= seconds[-1] > 0


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
def test_how_a_script_ends_is_written_and_one_that_left_goes_on(tmp_path):
    folder, saved = tmp_path / "runs" / "mine", str(tmp_path / "saved")

    def script(then: str, into: Path | None = folder) -> str:
        return SCRIPT.format(run=None if into is None else str(into), saved=saved, then=then.format(saved=saved))

    failed = run(tmp_path, script(FAILS, tmp_path / "failed"), 3)
    assert failed.returncode != 0 and f"this run is written to {tmp_path / 'failed'}" in failed.stderr
    found = Run(tmp_path / "failed")
    assert (found.outcome, found.start.reason) == ("failed", "OSError: no more")
    assert run(tmp_path, script(LEAVES), 3).returncode == 75
    assert (Run(folder).outcome, Run(folder).start.reason) == (
        "interrupted", "the script ended before hpcdist.finish",
    )  # fmt: skip
    done = run(tmp_path, script("pass"), 3)
    assert done.returncode == 0, done.stderr
    ended = Run(folder)
    assert ended.outcome == "ended" and len(ended.record.resumed) == 1
    assert [(one.epoch, one.step, one.metrics["epoch"]) for one in ended.evaluations] == [
        (1, 5, 0), (2, 10, 1), (3, 15, 2),
    ]  # fmt: skip
    assert ended.summary.samples == 3 * 40 and [one.samples for one in ended.evaluations] == [40, 80, 120]
    assert [start.step for start in (ended.record, *ended.record.resumed)] == [0, 5]
    seconds = [one.seconds for one in ended.evaluations]
    assert seconds == sorted(seconds) and ended.summary.wall_s >= seconds[-1]


@pytest.mark.extended
@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
def test_a_batch_job_says_where_its_scripts_write(tmp_path):
    text = SCRIPT.format(run=None, saved=str(tmp_path / "saved"), then="pass")
    name = Path(write(tmp_path, text)).stem
    for number in ("", "-2"):
        done = run(tmp_path, text, 3, env={"HPCDIST_RUN": str(tmp_path / "job")})
        assert done.returncode == 0, done.stderr
        assert load_summary(tmp_path / "job" / f"{name}{number}").ranks == 3
