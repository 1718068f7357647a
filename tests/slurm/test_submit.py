"""`hpcdist.submit` on ranks of this machine, and what is refused; on Slurm it is tested in tests/cluster."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import hpcdist as hd
from harness.launch import find_mpirun
from hpcdist.errors import ConfigError, MismatchError, QueueError, RunError, UnknownNameError
from hpcdist.tools.slurm import call

here = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun beside this Python or on PATH")


@pytest.fixture
def local(tmp_path):
    """`local(function, ...)` submits a function to ranks of this machine."""
    return partial(hd.submit, site="local", output=str(tmp_path / "runs"))


class Unpickled(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


@here
def test_each_rank_calls_the_function(local, tmp_path):
    def joined(first, scale):
        hd.init()
        print(f"rank {hd.rank()}")
        return hd.rank(), float(hd.allreduce(first * hd.rank())) * scale

    future = local(joined, 2.0, scale=10, nodes=2)
    assert future.state == "RUNNING" and not future.done()
    assert future.results() == [(0, 10.0), (1, 10.0)] and future.result() == (0, 10.0)
    assert future.done() and future.exception() is None and future.state == "COMPLETED"
    assert sorted(future.stdout().splitlines()) == ["rank 0", "rank 1"] and future.stderr() == ""
    assert future.folder.parent == tmp_path / "runs" and future.folder.name.startswith("joined-")
    assert future.folder.stat().st_mode & 0o077 == 0, "pickles are for their owner alone"
    assert f"job {future.job_id} is COMPLETED" in repr(future)


@here
def test_an_exception_comes_with_its_traceback(local):
    def fails_on_one_rank():
        if call.task(os.environ).rank == 0:
            time.sleep(100)
        raise LookupError("here")

    def fails_unpickled():
        raise Unpickled(1, 2)

    future, other = local(fails_on_one_rank, ranks_per_node=2), local(fails_unpickled)
    with pytest.raises(LookupError, match="here") as caught:
        future.result()
    assert "on rank 1 of job" in str(caught.value.__cause__)
    assert "in fails_on_one_rank" in str(caught.value.__cause__) and future.state == "FAILED"
    with pytest.raises(RunError, match="must raise picklable exceptions; got Unpickled: 1 and 2"):
        other.result()


@here
def test_a_job_without_results_says_how_it_ended(local):
    def killed():
        print("it dies", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    future, waiting, unpicklable = local(killed), local(time.sleep, 100), local(threading.Lock)
    waiting.cancel()
    waiting.cancel()
    assert waiting.state == "CANCELLED"
    with pytest.raises(RunError, match=r"job \d+ is CANCELLED with status 1, without a result of any rank"):
        waiting.result()
    with pytest.raises(RunError, match="(?s)is FAILED with status 137, without a result of any rank.*it dies"):
        future.result()
    assert isinstance(unpicklable.exception(), TypeError) and "pickle" in str(unpicklable.exception())


def test_a_call_is_refused_by_another_python(tmp_path):
    (tmp_path / "call.pickle").write_bytes(call.pickled_call(max, (1, 2), {}))
    assert call.run_call(tmp_path) == 2
    path = tmp_path / "call.pickle"
    with open(path, "rb") as file:
        _, places = pickle.load(file)
        rest = file.read()
    path.write_bytes(pickle.dumps(((3, 5), places)) + rest)
    with pytest.raises(MismatchError, match=r"Python must be 3\.5 on the nodes, .*; got 3\.\d+"):
        call.run_call(tmp_path)


def test_what_is_wrong_is_refused_before_there_is_a_folder(local, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="nodes must be"):
        local(max, 1, nodes=0)
    with pytest.raises(UnknownNameError, match="site must be one of"):
        local(max, 1, site="nowhere")
    with pytest.raises(ConfigError, match="warn_s must be less than the time limit, 60 s; got 100"):
        local(max, 1, site="generic", time_min=1, warn_s=100)
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="argument 2 must be picklable by cloudpickle, .*; got a lock .*Create it"):
        local(max, 1, lock)
    with pytest.raises(ConfigError, match="key must be picklable by cloudpickle, .*; got a lock"):
        local(max, 1, key=lock)
    with pytest.raises(ConfigError, match="function must be picklable by cloudpickle, .*; got a function"):
        local(lambda: lock)
    with pytest.raises(ConfigError, match="name must have at most 200 bytes; got .nnn"):
        local(max, 1, name="n" * 300)
    assert not (tmp_path / "runs").exists()


def test_without_slurm_it_says_so(local, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bash = Path("bin", "bash")
    bash.parent.mkdir()
    bash.symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(bash.parent.absolute()))
    with pytest.raises(QueueError, match="sbatch must be on PATH to reach Slurm"):
        local(max, 1, 2, site="generic")
    assert not list((tmp_path / "runs").iterdir()), "nothing is left of a job that was not submitted"
