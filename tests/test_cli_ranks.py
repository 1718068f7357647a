"""The command line on several ranks: whatever fails, and wherever, is told once, and every rank ends."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
from pathlib import Path

import pytest

from harness.launch import IMPORTS, find_mpirun, launch, started, wait_until
from hpcdist import checkpoint
from hpcdist.records import load_run, load_summary, read_evaluations
from train import tiny

TINY = str(Path(__file__).parent / "train" / "tiny.py")
QUICK = ("--set", "data.path=digits.h5", "--set", "epochs=1")  # the file is made once, for all tests

pytestmark = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun beside this Python or on PATH")


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "digits.h5"
    tiny.job.data(path)
    return path


@pytest.fixture(autouse=True)
def _in_a_folder_with_data(tmp_path, monkeypatch, digits):
    monkeypatch.chdir(tmp_path)
    Path("digits.h5").symlink_to(digits)


def hpcdist(size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return launch(size, ["-m", "hpcdist", *arguments], env=IMPORTS)


SEVERAL = """
import sys
from hpcdist.faults import reporter
from hpcdist.tools import cli

cli.SILENT_S = reporter.SILENT_S = 0.0
rank = cli.launched_rank()
BENCH = "bench allreduce --sizes 4096 --algorithm ring --rounds 1"
TRAIN = f"train {sys.argv[1]} --set data.path=digits.h5 --set epochs=1"
REFUSED = f"{TRAIN} --set epochs=0", f"{TRAIN} --config lacking-{rank}.toml"
for words in ("topology ring --ranks 3", f"{TRAIN} --nonsense", BENCH, *REFUSED, f"{TRAIN} --config other-{rank}.toml"):
    sys.argv = ["hpcdist", *words.split()]
    try:
        if words in REFUSED:  # after which the command would end all ranks
            sys.exit(cli._run(sys.argv[1:], rank == 0))
        cli.main()
    except SystemExit as end:
        if rank == 0:
            print("status", end.code, file=sys.stderr)
"""


def test_what_one_rank_does_and_what_any_or_all_of_them_refuse_is_told_once():
    """The job runs several commands in turn; the last one fails and ends it."""
    Path("lacking-0.toml").write_text("seed = 1")
    for rank in range(2):
        Path(f"other-{rank}.toml").write_text(f"seed = {rank}")
    done = launch(2, ["-c", SEVERAL, TINY], env=IMPORTS)
    assert done.returncode == 1 and done.stdout.count("columns sum to 1: yes") == 1
    statuses = [line for line in done.stderr.splitlines() if line.startswith("status")]
    assert statuses == [f"status {status}" for status in (0, 2, 0, 1, 1)]
    for message in (
        "No such option: --nonsense",
        "Usage:",
        "hpcdist: error: epochs must be greater than or equal to 1; got 0.",
        "hpcdist: error: on rank 1: configuration file must exist; got lacking-1.toml.",
        "rank 1 differs from rank 0: seed: 0 against 1",
    ):
        assert done.stderr.count(message) == 1, message
    assert done.stderr.count("hpcdist: error: ") == 3 and "Traceback" not in done.stderr
    if os.cpu_count() == 2 == len(os.sched_getaffinity(0)):
        assert f"hpcdist: {platform.node()}: cores of its ranks 0 | 1" in done.stderr.splitlines(), "the benchmark"


FAILING = """
import dataclasses, time
from hpcdist import session
from train import tiny

calls = 0

def loss(outputs, targets):
    global calls
    calls += 1
    if session.rank() == session.size() - 1 and calls == 5:
        {failure}
    return tiny.job.loss(outputs, targets)

job = dataclasses.replace(tiny.job, loss=loss)
"""


def test_an_exception_on_one_rank_is_shown_and_ends_the_others():
    Path("failing.py").write_text(FAILING.format(failure="raise KeyError('rank two is unhappy')"))
    done = hpcdist(3, "train", "failing.py", *QUICK, "--set", "strategy=parameter_server")
    assert done.returncode == 1 and "records in" not in done.stdout
    shown = [line for line in done.stderr.splitlines() if line.startswith("[rank ")]
    assert shown[0] == "[rank 2] Traceback (most recent call last):"
    assert shown[-1] == "[rank 2] KeyError: 'rank two is unhappy'"
    assert {line[:8] for line in shown} == {"[rank 2]"} and done.stderr.count("rank two is unhappy") <= 3


def test_an_error_of_ours_on_one_rank_has_no_traceback():
    Path("failing.py").write_text(FAILING.format(failure="return outputs.sum() * float('nan')"))
    done = hpcdist(2, "train", "failing.py", *QUICK, "--set", "strategy=gossip_pull")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.count("hpcdist: error: gradients must be finite; got NaN or infinite gradient at step 5") == 1


def test_progress_is_in_lines_of_rank_0_and_a_home_that_cannot_be_written_costs_a_note(monkeypatch):
    """Also where the launcher gives each rank a terminal. Lost are measurements of all-reduce, which are made again."""
    monkeypatch.setenv("HOME", "/proc/nowhere")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    done = hpcdist(2, "train", TINY, *QUICK, "--set", "log_every=4")
    lines = done.stdout.replace("\r\n", "\n").splitlines()
    assert done.returncode == 0 and "\r" not in "".join(lines) and "\x1b" not in done.stdout, done.stderr
    assert [line.split()[0:2] for line in lines[:-1]] == [["allreduce", p] for p in ("36%", "71%", "100%", "100%")]
    assert lines[-1].startswith("allreduce on 2 ranks: test accuracy 0.")
    (line,) = done.stderr.splitlines()
    assert line.startswith("hpcdist: the table of all-reduce times can't be cached in /proc/nowhere/.cache/hpcdist/")


def test_a_killed_run_resumes_to_the_same_bits():
    """A rank is killed in the middle (SIGKILL); the resumed run ends where one on virtual ranks ends uninterrupted."""
    Path("stuck.py").write_text(tiny.STUCK.replace("UP_TO", "11"))
    settings = ("checkpoint.every_steps=4", "strategy.algorithm=ring", "data.path=digits.h5")
    arguments = ["train", "stuck.py", *(word for s in settings for word in ("--set", s)), "--output", "it"]
    with started(2, ["-m", "hpcdist", *arguments], Path("log"), env=IMPORTS) as job:
        wait_until(lambda: _newest_step() >= 8 or job.poll() is not None)
        victim = next(int(path.name.split("-")[1]) for path in sorted(Path().glob("pid-*")))
        os.kill(victim, signal.SIGKILL)
        assert job.wait(timeout=100) != 0, Path("log").read_text()
    assert not Path("it/summary.json").exists() and _newest_step() >= 8

    Path("stuck.py").write_text(tiny.STUCK.replace("UP_TO", "10**6"))
    done = hpcdist(2, *arguments, "--resume")
    assert done.returncode == 0, done.stderr
    assert "hpcdist: resuming from it/checkpoints/step-0000" in done.stderr

    resumed, uninterrupted = load_summary("it"), tiny.uninterrupted(2, Path("virtual").resolve(), *settings)
    assert (resumed.sha256, resumed.metrics) == (uninterrupted.sha256, uninterrupted.metrics)
    assert resumed.samples == uninterrupted.samples

    run = load_run("it")
    assert run.outcome in (None, "failed") and "MPI" in run.versions["mpi"] and run.hosts == [platform.node()] * 2
    assert len(run.resumed) == 1 and run.last.ended and run.last.went_on_from.startswith("it/checkpoints/step-0000")
    assert run.last.command[1:] == [*arguments, "--resume"]
    assert [evaluation.step for evaluation in read_evaluations("it")] == [12, 24, 36]


def _newest_step() -> int:
    newest = checkpoint.latest("it/checkpoints")
    return int(newest.name[5:13]) if newest else 0
