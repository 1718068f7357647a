"""Ranks that die, stand still or never come before all have met in `hpcdist.init`: one sentence, and all end."""

from __future__ import annotations

import os
import re
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from comm.jobs_here import run, run_alone
from faults.deaths import ULFM, survivable
from harness.launch import IMPORTS, find_mpirun, launch
from hpcdist.comm.launch import Task, task_or_none
from hpcdist.comm.mpi import start

needs_mpirun = pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")

BEGIN = """
import os, signal, sys, time

rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
"""
JOIN = """
import hpcdist as hd

hd.init(deadline_s={})
print("joined")
"""
AT_ONCE, LATE = JOIN.format(3), JOIN.format(60)  # how soon they tire of waiting for each other
WAITED = r"hpcdist: rank \d waited 3 s in hpcdist.init\(\) for the other ranks of 3\. A rank ended before"


@survivable
def test_a_rank_that_dies_before_mpi_is_up_is_not_waited_for_for_ever(tmp_path):
    job = run(tmp_path, BEGIN + "if rank == 1:\n    die()\n" + AT_ONCE, 3, options=ULFM)
    assert job.returncode != 0
    assert re.search(WAITED, job.stderr), job.stderr
    assert job.stderr.count("hpcdist: ") == 1 and "Traceback" not in job.stderr


@needs_mpirun
def test_a_rank_that_is_stopped_before_it_comes_is_not_waited_for_for_ever(tmp_path):
    job = run(tmp_path, BEGIN + "if rank == 2:\n    os.kill(os.getpid(), signal.SIGSTOP)\n" + AT_ONCE, 3)
    assert job.returncode != 0
    assert re.search(WAITED, job.stderr), job.stderr
    assert job.stderr.count("hpcdist: ") == 1 and "Traceback" not in job.stderr


@survivable
@pytest.mark.parametrize(
    "death",
    [
        "from mpi4py import MPI\nif rank == 0:\n    die()",
        "from hpcdist.comm.mpi import communicator\nif rank == 0:\n    communicator.find_nodes = die",
        "from hpcdist.session import world\nif rank == 0:\n    world.require_equal = die",
    ],
    ids=["before the ranks meet", "in a call of MPI's", "in a call of the seam's"],
)
def test_a_rank_that_dies_in_the_middle_of_it_is_named_once(tmp_path, death):
    job = run(tmp_path, BEGIN + death + LATE, 3, options=ULFM)
    assert job.returncode != 0
    assert job.stderr.count("hpcdist: rank 0 has died before all ranks had arrived in hpcdist.init()") == 1, job.stderr
    assert "Traceback" not in job.stderr and "joined" not in job.stdout


# --- exceptions before all ranks have met, or right after -------------------------------------------------------------
@needs_mpirun
def test_a_script_that_fails_on_one_rank_before_it_comes_there_ends_all(tmp_path):
    job = run(tmp_path, BEGIN + "if rank == 1:\n    raise ValueError('no such file')\n" + LATE, 3)
    assert job.returncode != 0 and "joined" not in job.stdout
    assert job.stderr.count("Traceback (most recent call last)") == 1
    assert job.stderr.count("ValueError: no such file") == 1


MISTAKES = {
    "run=sys.executable": "run must be ",
    "run='runs/mine'": "run must be a folder in which no run has ended; got runs/mine, where one has",
    "torch_distributed='mpi'": "torch_distributed must be True, 'gloo', 'nccl' or False; got 'mpi'.",
    "), hd.DistributedOptimizer(SGD(model.parameters(), lr=1), model, 'allreduced'": "Did you mean 'allreduce'?",
}
MISTAKEN = """
import hpcdist as hd, sys
from hpcdist.faults import reporter
from torch import nn
from torch.optim import SGD

reporter.FIRST_S = reporter.MAX_S = 30  # rank 0 may be late
model = nn.Linear(2, 1)
hd.init({})
"""


@needs_mpirun
def test_a_mistake_in_a_script_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/summary.json").write_text("{}")
    for given, message in MISTAKES.items():
        _require_sentence(run(tmp_path, MISTAKEN.format(given), 2), message, "[rank 0] ")
    _require_sentence(run_alone(tmp_path, MISTAKEN.format(given)), message, "")


def _require_sentence(job, message, label):
    said = [line for line in job.stderr.splitlines() if "hpcdist: error: " in line]
    assert job.returncode == 1 and len(said) == 1 and message in said[0], job.stderr
    assert re.search(r"script\.py:9\)$", said[0]) and "Traceback" not in job.stderr
    assert said[0].startswith(f"{label}hpcdist: error: ")


JOB = """
import dataclasses, sys
from hpcdist import session
from train import tiny

def fail():
    if session.rank() in {ranks}:
        raise ValueError("unhappy")

def model():
    {in_model}
    return tiny.job.model()

{at_import}
job = dataclasses.replace(tiny.job, model=model)
"""

RANK_0_MAY_BE_LATE = "from hpcdist.faults import reporter\nreporter.FIRST_S = reporter.MAX_S = 30"


@needs_mpirun
@pytest.mark.parametrize(
    ("failing", "places", "speaks"),
    [
        ((2,), {"at_import": "fail()", "in_model": "pass"}, 2),
        ((0, 1, 2), {"at_import": RANK_0_MAY_BE_LATE, "in_model": "fail()"}, 0),
    ],
    ids=["job file, one", "model, all"],
)
def test_a_job_that_fails_before_the_first_step_has_one_traceback(tmp_path, monkeypatch, failing, places, speaks):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB.format(ranks=failing, **places))
    done = launch(3, ["-m", "hpcdist", "train", "job.py", "--set", "data.path=digits.h5"], env=IMPORTS)
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    assert done.stderr.count(f"[rank {speaks}] ValueError: unhappy") == 1
    assert {line[:8] for line in done.stderr.splitlines() if line.startswith("[rank ")} == {f"[rank {speaks}]"}


# --- the limit alone --------------------------------------------------------------------------------------------------
LIMITED = """
import ctypes, os, signal, time
from hpcdist.comm.launch import Task
from hpcdist.comm.mpi.start import limited

"""


def test_it_ends_a_process_that_keeps_the_interpreter_lock(tmp_path):
    """As one does that is inside MPI's start: nothing in Python runs there."""
    text = "with limited(0.3, Task(0, 2, 0, 'a launcher')):\n    ctypes.PyDLL(None).sleep(600)"
    done = run_alone(tmp_path, LIMITED + text)
    assert done.returncode == start.ENDS
    assert re.match(r"hpcdist: rank 0 waited 0.3 s in hpcdist.init\(\) for the other ranks of 2", done.stderr)


def test_a_process_that_is_stopped_says_so(tmp_path):
    text = """
with limited(0.3, Task(0, 2, 0, 'a launcher')):
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
"""
    done = run_alone(tmp_path, LIMITED + text)
    assert done.returncode == start.ENDS
    assert "hpcdist: rank 0 is stopped, by SIGSTOP or a debugger, in hpcdist.init(), and not all" in done.stderr


def test_of_a_process_that_ends_by_itself_nothing_is_said(tmp_path):
    done = run_alone(tmp_path, LIMITED + "with limited(600, Task(0, 2, 0, 'a launcher')):\n    os._exit(3)")
    assert (done.returncode, done.stderr) == (3, "")


def _children():
    """The processes that this one has started, and not waited for."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            _, parent, *_ = path.read_text().rpartition(")")[2].split()
            found |= {path.parent.name} if int(parent) == os.getpid() else set()
    return found


@pytest.mark.parametrize("task", [None, Task(0, 1, 0, "a launcher"), Task(1, 2, 1, "a launcher")])
def test_in_time_it_leaves_everything_as_it_was(task):
    before, children = signal.getsignal(start.ENDS), _children()
    with start.limited(60.0, task):
        assert (_children() == children) == (task is None or task.size == 1)
    assert signal.getsignal(start.ENDS) is before and _children() == children


def test_a_launcher_that_contradicts_itself_sets_no_limit():
    size = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert task_or_none(size | {"OMPI_COMM_WORLD_RANK": "1"}) == Task(1, 2, 0, "Open MPI's mpirun")
    assert task_or_none(size | {"OMPI_COMM_WORLD_RANK": "7"}) is None
    assert task_or_none({}) is None


def test_slurm_is_asked_for_short_values_only_while_mpi_starts():
    """By whoever speaks PMI-1 to it; everything else passes as it is, both ways."""
    before, (mpi, launcher) = _children(), socket.socketpair()
    maxes = b"cmd=maxes rc=0 kvsname_max=1024 keylen_max=256 vallen_max=%d\n"
    with mpi, launcher:
        with start._short_values(mpi.fileno()):
            for told, heard in ((1024, start.VALUE), (500, 500)):
                mpi.sendall(b"cmd=get_maxes\n")
                assert launcher.recv(100) == b"cmd=get_maxes\n"
                launcher.sendall(maxes % told)
                assert mpi.recv(100) == maxes % heard
            launcher.sendall(b"cmd=get_result value=vallen_max=1024\n")
            assert mpi.recv(100) == b"cmd=get_result value=vallen_max=1024\n"
        launcher.sendall(maxes % 1024)
        assert mpi.recv(100) == maxes % 1024, "they are connected again"
        assert _children() == before
        closed = os.dup(mpi.fileno())
    os.close(closed)
    with start._short_values(closed):
        assert _children() == before, "a connection that is closed is left alone"
