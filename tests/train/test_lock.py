"""Two runs in one folder: the second is refused while the first is at work, however the first ends."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cases import each
from harness.launch import IMPORTS, find_mpirun, launch, wait_until
from hpcdist.comm.launch import unlaunched
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import ConfigError
from hpcdist.records import load_summary, locked, read_records
from hpcdist.train import runs
from train import tiny


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun beside this Python or on PATH")
def test_of_two_runs_in_one_folder_the_second_is_refused_until_the_first_is_gone():
    # Rank 0, which speaks, may be late.
    patient = "from hpcdist.faults import reporter\nreporter.FIRST_S = reporter.MAX_S = 30\n"
    Path("slow.py").write_text(patient + tiny.STUCK.replace("UP_TO", "15"))
    settings = ("data.path=digits.h5", "epochs=1", "checkpoint.every_steps=4")
    words = ["-m", "hpcdist", "train", "slow.py", *(word for s in settings for word in ("--set", s)), "--output", "it"]
    environment = {**unlaunched(os.environ), **IMPORTS}

    def train(comm, **given):
        return runs.train(comm, Path("slow.py"), None, settings, Path("it"), **given)

    with subprocess.Popen([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL) as first:
        try:
            wait_until(lambda: list(Path("it").glob("checkpoints/step-????????")) or first.poll() is not None)
            first.send_signal(signal.SIGSTOP)  # it has the lock, for as long as this takes
            held_by = f"got it, held by process {first.pid} on host {platform.node()} since 2"
            with pytest.raises(ConfigError, match=held_by):
                run_virtual(train, 1)
            resumed = launch(2, [*words, "--resume"], env=IMPORTS)
            said = resumed.stderr
            assert resumed.returncode == 1 and resumed.stdout == "" and "Traceback" not in said
            assert said.count("hpcdist: error: --output must be a folder in which no other run is at work") == 1
            assert said.count(held_by) == 1 and said.count("hpcdist: ") == 1
        finally:
            first.kill()

    Path("slow.py").write_text(tiny.STUCK.replace("UP_TO", "10**6"))
    run_virtual(lambda comm: train(comm, resume=True), 1)
    assert [record.step for record in read_records("it")[0]] == list(range(1, 24)), "no step is lost or doubled"
    assert load_summary("it").samples == 359


def test_a_lock_is_free_again_after_its_run_also_after_one_that_failed():
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            with locked(Path()):
                assert Path(".lock").read_text().startswith(f"process {os.getpid()} on host ")
                with pytest.raises(ConfigError, match="must be a folder in which no other run is at work"):
                    with locked(Path()):
                        pass
                raise ZeroDivisionError
        assert Path(".lock").read_text() == ""


@each(
    "case",
    [
        ("", False),
        (f"process {os.getpid()} on host {platform.node()} since 2026-01-01 00:00:00 +0000\n", True),
        (f"process {os.getpid()} on host another since 2026-01-01 00:00:00 +0000\n", False),
        (f"process 4194304 on host {platform.node()} since 2026-01-01 00:00:00 +0000\n", False),  # is dead
    ],
)
def test_without_locks_of_the_file_system_a_holder_of_this_host_is_seen(monkeypatch, case):
    holder, refused = case
    _no_locks(monkeypatch, errno.ENOLCK)
    Path(".lock").write_text(holder)
    if refused:
        with pytest.raises(ConfigError, match=f"held by process {os.getpid()} on host"):
            with locked(Path()):
                pass
    else:
        with locked(Path()):
            assert f"process {os.getpid()} " in Path(".lock").read_text()


def test_another_failure_to_lock_is_no_lock(monkeypatch):
    _no_locks(monkeypatch, errno.EIO)
    with pytest.raises(ConfigError, match="--output must be a folder .*Input/output error"):
        with locked(Path()):
            pass


def _no_locks(monkeypatch, number: int) -> None:
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
