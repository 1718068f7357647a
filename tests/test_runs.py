"""`hpcdist runs`: the list of runs, their tags, and their removal."""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path
from shutil import copytree

import pytest

from harness.cases import each
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import ConfigError, DataError
from hpcdist.records import end_run, load_run, locked, start_run
from hpcdist.tools import cli, console
from hpcdist.tools.cli.runs import rm, tag
from hpcdist.tools.runs.listing import read_listed, read_tags
from hpcdist.train import runs
from study import evidence

JOB = Path(__file__).with_name("train") / "tiny.py"


@pytest.fixture
def hpcdist(capsys):
    """Runs a command line: exit status, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()  # of what came before
        return cli._run(list(arguments), True), *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder `runs` with a finished run on each of 1 and 2 ranks, and one that was interrupted in a comparison."""
    folder = tmp_path_factory.mktemp("trained")
    settings = ["data.path=digits.h5", "epochs=1"]
    inner = Path("runs/compare-tiny/runs/a")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for ranks in (1, 2):
            run_virtual(lambda comm: runs.train(comm, JOB, None, settings), ranks)
        run_virtual(lambda comm: runs.train(comm, JOB, None, settings, inner), 1)
        (inner / "summary.json").unlink()
        end_run(inner, "interrupted", "SIGTERM")
        Path("runs/compare-tiny/comparison.json").write_text("{}")
    return folder


@pytest.fixture
def made(trained, tmp_path, monkeypatch) -> None:
    """A copy of it in the current folder."""
    copytree(trained / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)


def listed(hpcdist, *arguments) -> list[dict]:
    status, out, err = hpcdist("runs", *arguments, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_runs_are_listed_filtered_and_sorted(hpcdist, made):
    found = listed(hpcdist, "--sort", "ranks")
    assert [(one["folder"], one["state"], one["ranks"]) for one in found] == [
        ("runs/compare-tiny/runs/a", "interrupted", 1),
        ("runs/tiny-allreduce-1-1", "ended", 1),
        ("runs/tiny-allreduce-2-1", "ended", 2),
    ]
    assert [one["comparison"] for one in found] == ["runs/compare-tiny", None, None]
    assert found[1]["metrics"] and found[1]["job"] == "tiny" and found[1]["time_s"] >= 0
    assert [one["ranks"] for one in listed(hpcdist, "--where", "ranks=2", "--state", "ended")] == [2]
    assert len(listed(hpcdist, "--where", "comparison=compare-tiny")) == 1
    assert len(listed(hpcdist, "--where", "epochs=1.0", "--where", "strategy.name=allreduce")) == 3
    assert listed(hpcdist, "--where", "optimizer.lr=7") == []
    for number in (10, 2):
        Path("runs/tiny-allreduce-1-1").rename(folder := Path(f"runs/tiny-allreduce-1-{number}"))
        copytree(folder, "runs/tiny-allreduce-1-1")
    names = [Path(one["folder"]).name for one in listed(hpcdist, "--sort", "folder", "--where", "ranks=1")]
    assert names == ["a", "tiny-allreduce-1-1", "tiny-allreduce-1-2", "tiny-allreduce-1-10"]
    assert max(map(len, hpcdist("runs")[1].splitlines())) < 120


def test_a_run_is_shown_with_its_commands_and_settings_and_others_beside_it(hpcdist, made):
    status, out, _ = hpcdist("runs", "show", "tiny-allreduce-2-1")
    assert status == 0 and "state: ended" in out and "settings:" in out and "from step 0" in out
    assert "no result: was interrupted at" in hpcdist("runs", "show", "runs/compare-tiny/runs/a")[1]
    assert "sign of life" not in out
    status, out, _ = hpcdist("runs", "compare", "tiny-allreduce-1-1", "runs/tiny-allreduce-2-1")
    assert status == 0 and "allreduce" in out, "in the table of reports"


def test_of_a_run_that_was_just_killed_it_is_shown_what_is_known(hpcdist, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("it").mkdir()
    Path("it/run.json").write_text(json.dumps(evidence.start(ranks=1)))
    holder = f"process 4194304 on host {platform.node()} since 2026-01-31 12:00:00 +0000"
    Path("it/.lock").write_text(holder)
    out = hpcdist("runs", "show", "it")[1]
    assert "state: running" in out and re.search(
        rf"last sign of life: \d s ago; {re.escape(holder)}, has ended: the", out
    )
    with locked(Path("it")):
        assert re.search(r"last sign of life: \d s ago\n", hpcdist("runs", "show", "it")[1])
    Path("it/.lock").write_text(holder)
    for file in Path("it").iterdir():
        os.utime(file, (0, 0))
    (found,) = listed(hpcdist, "--in", ".")
    assert (found["state"], found["time_s"]) == ("dead", None)
    said = "no result: was killed, or its host failed; --resume or the same script continues"
    assert said in " ".join(hpcdist("runs", "show", "it")[1].split())


def test_names_are_whole_in_a_narrow_terminal_and_interrupted_runs_have_a_metric(hpcdist, made, monkeypatch):
    name = "tiny-allreduce-1-1-with-a-long-name"
    Path("runs/tiny-allreduce-1-1").rename(Path("runs") / name)
    assert hpcdist("runs", "tag", name, "good-" * 9, "old")[0] == 0
    monkeypatch.setattr(console, "_is_terminal", lambda: True)
    for columns in (40, 70, 150):
        monkeypatch.setenv("COLUMNS", str(columns))
        out = hpcdist("runs")[1]
        assert name in out and (columns < 150 or "good-" * 9 in out), columns
    found = {(one["state"], one["ranks"]): one["metrics"] for one in listed(hpcdist)}
    assert found["interrupted", 1] == found["ended", 1] and list(found["interrupted", 1]) == ["accuracy", "loss"]
    assert "interrupted accuracy 0." in hpcdist("runs")[1]


def test_the_number_of_a_run_that_was_removed_is_not_used_again(hpcdist, made):
    def train() -> str:
        return run_virtual(lambda comm: runs.train(comm, JOB, None, ["data.path=digits.h5", "epochs=1"])[0].name, 2)[0]

    assert train() == "tiny-allreduce-2-2" and train() == "tiny-allreduce-2-3"
    assert hpcdist("runs", "rm", "tiny-allreduce-2-1", "tiny-allreduce-2-3", "--yes")[0] == 0
    assert train() == "tiny-allreduce-2-4"
    assert [path.name for path in Path("runs/.numbers").glob("*-2-*")] == ["tiny-allreduce-2-4"]
    with pytest.raises(ConfigError):  # no run has begun
        run_virtual(lambda comm: runs.train(comm, JOB, None, ["data.path=digits.h5", "parallel.stages=7"]), 2)
    assert train() == "tiny-allreduce-2-5"
    assert len(listed(hpcdist)) == 5


def test_tags_are_added_listed_and_taken_away(hpcdist, made):
    assert hpcdist("runs", "tag", "tiny-allreduce-1-1", "good", "old")[0] == 0
    assert hpcdist("runs", "tag", "tiny-allreduce-1-1", "old", "--remove")[0] == 0
    assert read_tags(Path("runs/tiny-allreduce-1-1")) == ["good"]
    assert [one["tags"] for one in listed(hpcdist, "--tag", "good")] == [["good"]]
    Path("runs/tiny-allreduce-1-1/tags.json").write_text("3")
    with pytest.raises(DataError, match="tags.json must be a list of words"):
        tag("tiny-allreduce-1-1", ["good"])
    assert "tiny-allreduce-1-1 is damaged: " in hpcdist("runs")[2]


@each(
    "case",
    [
        ("run.json", {"started": "yesterday"}, "must be what a run was started with; got started: "),
        ("run.json", {"started": "2026-01-31T12:00:00"}, "got started: "),
        ("run.json", {"settings": {"strategy": "allreduce"}}, "got settings.strategy: "),
        ("run.json", {"changed": {"seed": [1]}}, "got changed.seed: "),
        ("run.json", "loop", "got Too many levels of symbolic links"),
        ("tags.json", "folder", "must be readable; got Is a directory"),
        ("summary.json", "hole", "got it has more than 268435456 bytes"),
    ],
)
def test_a_damaged_run_is_listed_with_the_reason_and_hides_no_other(case, hpcdist, tmp_path):
    file, damage, reason = case
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    for name in ("good", "bad"):
        evidence.write_run(folder / name)
    path = folder / "bad" / file
    if isinstance(damage, dict):
        path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    elif damage == "folder":
        path.mkdir()
    else:
        path.unlink()
        path.symlink_to(path) if damage == "loop" else path.touch()
    if damage == "hole":
        os.truncate(path, 1 << 40)
    status, out, err = hpcdist("runs", "--in", str(folder))
    assert status == 0 and "damaged" in out and "ended" in out
    assert f"{folder}/bad is damaged: {path} must be" in err and reason in err
    if file != "tags.json":  # which reports don't read
        status, out, err = hpcdist("report", str(folder), "--json")
        found = json.loads(out)
        assert status == 0 and len(found["jobs"] if isinstance(found, dict) else found) >= 1
        assert hpcdist("report", str(folder / "bad"))[0] == 1
    rm([str(folder / "bad")], yes=True)
    assert not (folder / "bad").exists()


def test_runs_are_removed_but_not_those_at_work(hpcdist, made):
    folder = Path("runs/tiny-allreduce-2-1")
    start_run(folder, load_run(folder).last.model_copy(update={"ended": None, "outcome": None}))
    with locked(folder):
        assert read_listed(folder).state == "running"
        with pytest.raises(ConfigError, match="NAME must be a run that has stopped; got runs/tiny-allreduce-2-1"):
            rm(["tiny-allreduce-2-1"], yes=True)
    assert hpcdist("runs", "rm", "tiny-allreduce-1-1", "--yes")[0] == 0
    assert not Path("runs/tiny-allreduce-1-1").exists() and folder.exists()


@each(
    "case",
    [
        (["--state", "endd"], "--state must be one of .*Did you mean 'ended'"),
        (["--sort", "agee"], "--sort must be one of .*Did you mean 'age'"),
        (["--where", "ranks"], "--where must be KEY=VALUE; got 'ranks'"),
        (["--where", "strtegy=a"], "--where must name a setting of a run; got 'strtegy'. Did you mean 'strategy'?"),
        (["--in", "nowhere"], "--in must be a folder with runs in it; got nowhere"),
        (["compare", "nothing"], "NAME must be the folder of a run, or its name in runs; got nothing"),
    ],
)
def test_wrong_arguments(case, hpcdist, made):
    arguments, message = case
    status, _, err = hpcdist("runs", *arguments)
    assert status == 1 and re.search(message, " ".join(err.split()))
