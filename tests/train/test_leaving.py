"""Runs that leave early, and those that go on from there: together they are the run that was not interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import hpcdist
from harness.launch import IMPORTS, find_mpirun, launch_environment, on_terminal, started, wait_until
from hpcdist import checkpoint
from hpcdist.comm.virtual import Constant, run_virtual
from hpcdist.records import load_run
from hpcdist.session.leaving import Leaving
from hpcdist.tools.runs import Run
from hpcdist.train import runs
from hpcdist.train.interruption import Interruption
from train import tiny


def _run(comm, folder, *overrides, resume=None, ends_at=None):
    with tiny.training(comm, folder, *overrides, listens=True) as trainer:
        trainer.leaving = Leaving(comm, ends_at=ends_at, margin_s=0.0, every_s=0.3, clock=comm.now)
        summary = trainer.run(resume)
        tensors = [t.clone() for t in (*trainer.model.params, *trainer.model.buffers)]
        return trainer.leaving.reason, summary, tensors


@pytest.mark.parametrize("name", ["allreduce", "hardsync", "sgp"])
def test_left_and_resumed_it_ends_where_the_uninterrupted_run_ends(tmp_path, name):
    """On virtual ranks, 0.1 s a step: it leaves in the first or the second epoch."""
    options = (f"strategy={name}", "epochs=2")

    def parts(comm, folder, ends_at):
        reason, left, _ = _run(comm, folder, *options, ends_at=ends_at)
        assert left is None and reason.startswith("the time limit, ")
        path = checkpoint.latest(folder / "run" / "checkpoints")
        return _run(comm, folder, *options, resume=path)

    ranks = 3 if name == "hardsync" else 2
    expected = run_virtual(lambda comm: tiny.run(comm, tmp_path / "whole", *options), ranks, compute=Constant(0.1))
    for ends_at in (0.9, 1.65):
        folder = tmp_path / f"left-{ends_at}"
        found = run_virtual(lambda comm: parts(comm, folder, ends_at), ranks, compute=Constant(0.1))
        assert all(reason is None for reason, *_ in found), f"left at {ends_at}"
        tiny.require_same([end for _, *end in found], expected)


def test_where_leaving_is_switched_off_nobody_listens_and_ranks_meet_for_checkpoints_by_time_alone(tmp_path):
    def body(comm, *settings):
        given = {"ends_at": 0.0, "listens": True}
        with tiny.training(comm, tmp_path, "leave.enabled=false", "epochs=1", *settings, **given) as trainer:
            assert trainer.run() is not None
            return trainer.leaving

    (leaving,) = run_virtual(body, 1)
    assert leaving.clock_s is not None
    assert run_virtual(lambda comm: body(comm, "checkpoint.every_s=0"), 1) == [None]


# The same job, whose ranks leave a file `pid-N` once they train, and then wait for a signal, which one of them may get.
WAITING = """
import dataclasses, os, pathlib, signal, time
from train import tiny

waits = pathlib.Path("waits")

def hear(number, frame):
    before[number](number, frame)
    waits.unlink(missing_ok=True)

def loss(outputs, targets):
    global before
    if waits.exists() and not before:
        before = {number: signal.signal(number, hear) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
        pathlib.Path(f"pid-{os.getpid()}").touch()
    while waits.exists():
        time.sleep(0.01)
    return tiny.job.loss(outputs, targets)

before = {}
job = dataclasses.replace(tiny.job, loss=loss)
"""
SETTING = ("strategy.algorithm=ring", "data.path=digits.h5", "leave.every_s=0.2")
GO_ON = f"mpirun -n 2 python -m hpcdist train slow.py {' '.join(f'--set {s}' for s in SETTING)} --output it --resume"
ARGUMENTS = ["train", "slow.py", *(word for s in SETTING for word in ("--set", s)), "--output", "it", "--resume"]


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun beside this Python or on PATH")
def test_a_signal_makes_all_ranks_save_and_leave_with_status_75(tmp_path, monkeypatch):
    """Whoever gets it. A run that has left twice ends where the uninterrupted one does."""
    monkeypatch.chdir(tmp_path)
    Path("slow.py").write_text(WAITING)
    _leaves("SIGUSR1", lambda job, pids: job.send_signal(signal.SIGUSR1))  # mpirun passes it on to the ranks
    _leaves("SIGINT", lambda job, pids: [os.kill(pid, signal.SIGINT) for pid in pids])  # as MPICH's mpiexec does

    def rest(comm):  # tests/test_cli_ranks.py goes on on real ranks
        return runs.train(comm, Path("slow.py"), None, SETTING, Path("it"), resume=True)[1]

    resumed, _ = run_virtual(rest, 2)
    uninterrupted = tiny.uninterrupted(2, Path("virtual").resolve(), "strategy.algorithm=ring")
    assert (resumed.sha256, resumed.metrics) == (uninterrupted.sha256, uninterrupted.metrics)
    assert resumed.samples == uninterrupted.samples


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun beside this Python or on PATH")
@pytest.mark.parametrize("how", ["typed", "a rank is killed"])
def test_ctrl_c_under_mpirun_shows_the_command_that_goes_on(tmp_path, monkeypatch, how):
    """Open MPI's mpirun kills its ranks half a second later, and shows nothing of them: they write to the terminal."""
    monkeypatch.chdir(tmp_path)
    Path("slow.py").write_text(WAITING)
    Path("waits").touch()
    words = [find_mpirun(), "-n", "2", sys.executable, "-m", "hpcdist", *ARGUMENTS]

    def act(terminal: int, shown: bytearray, is_running: Callable[[], bool]) -> None:
        wait_until(lambda: len(list(Path().glob("pid-*"))) == 2 or not is_running())
        if how == "typed":
            os.write(terminal, b"\x03")
        else:
            os.kill(max(int(path.name[4:]) for path in Path().glob("pid-*")), signal.SIGKILL)

    with launch_environment(IMPORTS, compiler=True) as environment:
        text, status = on_terminal(words, environment, act)
    killed = how == "a rank is killed"
    why = "rank 1 has failed, and mpirun ends the others" if killed else "interrupted by mpirun"
    assert status != 0 and f"hpcdist: {why}. Ranks save if mpirun leaves enough time" in text, text
    assert f"Resume with:\n  {GO_ON}\n" in text, text
    assert load_run("it").last.outcome == ("failed" if killed else "interrupted")
    assert not Path("it/summary.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])  # `hpcdist run` makes SIGUSR1 of the first Ctrl-C
def test_a_second_ctrl_c_ends_the_process(number):
    before, heard = signal.getsignal(signal.SIGINT), []
    with Leaving(hpcdist.init(), ctrl_c=True) as leaving:
        leaving.on_signal = heard.append
        os.kill(os.getpid(), number)
        assert heard == [number.name] and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert leaving.agree(1) == f"{number.name} on rank 0"
    assert signal.getsignal(signal.SIGINT) is before, "it is as before"


def test_the_command_that_goes_on():
    """As a user has typed it, with the launcher of these ranks."""
    srun = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "0", "PMIX_RANK": "0"}
    mpich = {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0"}
    words = ["/venv/bin/hpcdist", "train", "it.py", "--set", "log=my tool.py:It", "--output", "old", "--resume"]
    module = ["/lib/hpcdist/__main__.py", "train", "it.py", "--output=old"]
    output = "--output 'runs/a b' --resume"
    for given, environ, ranks, expected in (
        (words, {}, 1, "hpcdist train it.py --set 'log=my tool.py:It'"),
        (module, mpich, 3, "mpiexec -n 3 python -m hpcdist train it.py"),
        (["hpcdist", "train", "it.py"], srun, 8, "srun --mpi=pmix -n 8 hpcdist train it.py"),
    ):
        found = Interruption(Path("runs/a b"), Path("runs/a b/checkpoints"), given, environ, ranks, {})
        assert found.command == f"{expected} {output}"


def _leaves(name: str, send: Callable[[subprocess.Popen, Sequence[int]], None]) -> None:
    """Start the run, or go on with it, and send a signal once it trains."""
    Path("waits").touch()
    with started(2, ["-m", "hpcdist", *ARGUMENTS], Path("log"), env=IMPORTS) as job:
        wait_until(lambda: len(list(Path().glob("pid-*"))) == 2 or job.poll() is not None)
        send(job, [int(path.name.split("-")[1]) for path in Path().glob("pid-*")])
        status = job.wait(timeout=100)
    said = Path("log").read_text()
    assert status == 75, said
    assert said.count("hpcdist: left after step ") == 1 and "Traceback" not in said
    path = checkpoint.latest("it/checkpoints")
    assert f"({name} on rank " in said and f", saved in {path}. Resume with:\n  {GO_ON}\n" in said
    assert (load_run("it").last.outcome, Run("it").state) == ("interrupted", "interrupted")
    assert load_run("it").last.reason.startswith(f"{name} on rank ")
    assert not Path("it/summary.json").exists()
    for path in Path().glob("pid-*"):
        path.unlink()
