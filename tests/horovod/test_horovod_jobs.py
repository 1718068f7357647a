"""Jobs with real Horovod: ranks that are missing or die, settings for a whole process, a job that is all Horovod's."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

import pytest

from comm.jobs_here import ROOT, run
from harness.launch import find_mpirun, launch
from hpcdist.comm.mpi.library import loaded_here

pytestmark = [
    pytest.mark.usefixtures("horovod"),
    pytest.mark.time_limit(900),
    pytest.mark.skipif(find_mpirun() is None, reason="no mpirun beside this Python or on PATH"),
]

LIMIT_S = 240  # of a job: the machine may be busy
ENV = {"PYTHONPATH": str(ROOT)}
START = """
import os, signal, time, torch, hpcdist as hd
from hpcdist.comm.external.horovod import Horovod
"""


def script(folder: Path, text: str, size: int, **more):
    """Runs `text` after START on so many ranks; the finished process."""
    return run(folder, START + textwrap.dedent(text), size, timeout_s=LIMIT_S, **more)


def test_a_rank_that_is_missing_is_named(tmp_path):
    text = """
    comm = hd.init()
    reduce = Horovod(comm)
    reduce.all_reduce(torch.ones(3))
    hd.init(deadline_s=3)  # from here on: a busy machine may take longer to start
    if comm.rank == 1:
        time.sleep(600)
    reduce.all_reduce(torch.ones(3))
    """
    done = script(tmp_path, text, 2)
    assert done.returncode == 87
    assert re.search(r"rank 0 waited \d+\.\d s for every rank in an all-reduce by Horovod", done.stderr)
    assert "rank 1: not in a call of hpcdist; at " in done.stderr and "time.sleep(600)" in done.stderr


def test_without_a_watchdog_the_deadline_is_an_error(tmp_path):
    text = """
    from hpcdist.comm.mpi.world import world
    from hpcdist.comm.external import base as outside
    from hpcdist.errors import DeadlineError
    outside.WATCHDOG_S = 0.0
    comm = world(deadline_s=2)
    reduce = Horovod(comm)
    if comm.rank == 0:
        try:
            reduce.all_reduce(torch.ones(3))
        except DeadlineError as error:
            print(error, flush=True)
    else:
        time.sleep(600)
    comm.abort(3)
    """
    done = script(tmp_path, text, 2)
    assert "rank 0 of 2: an all-reduce by Horovod of 3 torch.float32 did not happen within 2 s" in done.stdout


def test_a_rank_that_dies_is_an_error_for_the_others(tmp_path):
    """Open MPI's mpirun lets them live that long with ULFM; they then end by themselves."""
    if "Open MPI" not in launch(1, ["-c", "from mpi4py import MPI; print(MPI.Get_library_version())"]).stdout:
        pytest.skip("only Open MPI's mpirun lets other ranks outlive a killed one")
    text = """
    from hpcdist.errors import CommunicationError
    comm = hd.init(deadline_s=30)
    reduce = Horovod(comm)
    reduce.all_reduce(torch.ones(3))
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(1000):
            reduce.all_reduce(torch.ones(3))
    except CommunicationError as error:
        print(type(error).__name__, error, flush=True)
    os._exit(4)
    """
    options = ["--with-ft", "ulfm"]
    done = script(tmp_path, text, 2, options=options)
    assert done.returncode != 0
    assert re.search(r"(RankFailed|Communication|Deadline)Error .*an all-reduce by Horovod", done.stdout)


def test_a_cycle_time_holds_to_the_end_of_the_process(tmp_path):
    text = """
    from hpcdist.errors import ConfigError
    comm = hd.init(deadline_s=30)
    for _ in range(2):
        reduce, tensor = Horovod(comm, cycle_time_ms=0.5), torch.ones(3)
        reduce.all_reduce(tensor)
        reduce.close()
        assert tensor[0] == comm.size
    for options in ({}, {"cycle_time_ms": 2.0}):
        try:
            Horovod(comm, **options)
        except ConfigError as error:
            assert "Horovod's settings must be the same for all objects in this process" in str(error)
    half = comm.split(comm.rank)
    try:
        Horovod(half, cycle_time_ms=0.5)
    except ConfigError as error:
        assert "cycle_time_ms must not be set if groups of Horovod's ranks" in str(error)
        print("refused", flush=True)
    """
    done = script(tmp_path, text, 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused") == 2


def test_a_horovod_that_runs_already_and_two_mpi_libraries_in_one_process_are_refused(tmp_path):
    mine = loaded_here()[0]
    text = f"""
    import ctypes
    import horovod.torch as hvd

    def refused():
        try:
            Horovod(comm)
        except Exception as error:
            print(type(error).__name__, error, flush=True)

    comm = hd.init(deadline_s=30)
    hvd.init()
    refused()
    hvd.shutdown()
    ctypes.CDLL({str(shutil.copy(mine.resolve(), tmp_path / mine.name))!r})
    refused()
    """
    done = script(tmp_path, text, 1)
    assert "ConfigError Horovod must not have been started by this program already" in done.stdout, done.stderr
    assert "CommunicationError mpi4py and Horovod must use one MPI library; got " in done.stdout, done.stderr
    assert str(mine) in done.stdout and str(tmp_path / mine.name) in done.stdout


def test_the_command_trains_by_it_and_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["data.path=digits.h5", "epochs=2", "checkpoint.every_steps=40"]
    options += ["strategy=allreduce", "strategy.provider=horovod"]
    command = ["-m", "hpcdist", "train", ROOT / "jobs" / "digits.py", "--output", "run"]
    command += [word for option in options for word in ("--set", option)]
    found = []
    for more in ([], ["--resume"]):
        done = launch(2, [*command, *more], env=ENV, timeout_s=LIMIT_S)
        assert done.returncode == 0, done.stderr
        found.append(re.search(r"test accuracy ([\d.]+), test loss ([\d.]+)", done.stdout).groups())
    assert "resuming from run/checkpoints/step-00000080" in done.stderr
    assert float(found[0][0]) > 0.9 and found[0] == found[1]


def test_the_job_that_is_all_horovods_learns(tmp_path):
    command = [ROOT / "jobs" / "horovod_gpu.py", "--epochs", "4", "--fp16", "--data", tmp_path / "digits.h5"]
    done = launch(2, command, env=ENV, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 ranks on c")
    assert len(lines) == 5 and lines[-1].startswith("epoch  4  loss 0.")
    assert float(re.search(r"accuracy (\S+)", lines[-1])[1]) > 0.9
