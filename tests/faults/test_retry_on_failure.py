"""What all living ranks do together, and again where one of them dies in it."""

from __future__ import annotations

import textwrap
from pathlib import Path

from comm.jobs_here import run
from faults.deaths import ULFM, survivable
from hpcdist.comm.virtual import run_virtual

BEGIN = """
import os, signal, time, torch
import hpcdist as hd
from hpcdist.errors import CommunicationError

comm = hd.init(deadline_s=60).split(0)  # a busy machine starts ranks late

def dies_in(owner, method, call):
    real, left = getattr(owner, method), call
    def armed(*args):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)
    setattr(owner, method, armed)

def action():
    ones = torch.ones(100_000)
    comm.allreduce(ones)
    told = comm.gather(str(comm.rank).encode())
    return ones.unique().tolist(), b" ".join(filter(None, told))
"""


def job(folder: Path, size: int, text: str):
    return run(folder, BEGIN + textwrap.dedent(text), size, options=ULFM)


@survivable
def test_a_result_is_that_of_the_living_on_each_of_them(tmp_path):
    """Ranks die before a collective, and in the middle of one: MPI then tells some of the others of no error."""
    text = """
        if comm.rank == 2:
            dies_in(comm.calls, "communicate", 2)
        first = comm.failures.retry_on_failure(action)
        if comm.rank in (0, 4):
            dies_in(*[(comm, "allreduce", 1), (comm.calls, "communicate", 2)][comm.rank // 4])
        found = [first, comm.failures.retry_on_failure(action), comm.failures.retry_on_failure(action)]
        print(f"rank {comm.rank}: {found} {comm.failures.alive} {sorted(comm.failures.lost)}", flush=True)
    """
    done = job(tmp_path, 5, text)
    assert done.returncode == 0, done.stderr
    found = [([4.0], b"0 1 3 4"), ([2.0], b"1 3"), ([2.0], b"1 3")]
    for rank in (1, 3):
        assert f"rank {rank}: {found} (1, 3) [0, 2, 4]" in done.stdout


@survivable
def test_a_rank_that_ends_by_an_exception_after_a_death_has_died_too(tmp_path):
    """The other ranks learn that this rank has ended, and do not wait for it until the deadline."""
    text = """
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if comm.rank == 1:
            while not comm.failures.failed():
                time.sleep(0.01)
            raise RuntimeError("too few are left")
        comm.failures.shrink()
        while 1 not in comm.failures.lost:
            comm.failures.shrink()
        print(f"rank {comm.rank}: {sorted(comm.failures.lost)}", flush=True)
        if comm.rank in {fails}:
            raise RuntimeError("none is left")
    """
    for fails, status in (((2, 3), 1), ((), 0)):
        done = job(tmp_path, 4, text.replace("{fails}", str(fails)))
        assert done.returncode == status, done.stderr
        assert "[rank 1] RuntimeError: too few are left" in done.stderr
        assert "rank 2: [0, 1]" in done.stdout and "rank 3: [0, 1]" in done.stdout


@survivable
def test_what_fails_though_nobody_dies_fails_everywhere(tmp_path):
    text = """
        def refuse():
            if comm.rank == 1:
                raise KeyError("its own")

        try:
            comm.failures.retry_on_failure(refuse)
        except (KeyError, CommunicationError) as error:
            print(f"rank {comm.rank}: {error}; then {comm.failures.retry_on_failure(action)}", flush=True)
    """
    done = job(tmp_path, 2, text)
    assert done.returncode == 0, done.stderr
    assert "succeeded on rank 0 and failed on another, though none has died" in done.stdout
    assert "rank 1: 'its own'; then ([2.0], b'0 1')" in done.stdout


def test_where_nobody_dies_it_is_the_action_alone():
    def body(comm):
        calls, failures = [], comm.failures
        result = failures.retry_on_failure(lambda: calls.append("once") or comm.rank, failures)
        return result, calls, failures.lost

    assert run_virtual(body, 2) == [(0, ["once"], ()), (1, ["once"], ())]
