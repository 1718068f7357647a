"""How runs of virtual ranks end: deadlocks, deadlines, exceptions, Ctrl-C."""

from __future__ import annotations

import re
import signal
import sys
import threading

import pytest
import torch

from harness.cases import each
from hpcdist.comm.virtual import Constant, clock, run_virtual
from hpcdist.errors import DeadlineError, DeadlockError


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("virtual rank")]


def here(comment: str) -> str:
    """`file:line` of the line of this file that ends in a comment."""
    with open(__file__) as file:
        lines = [n for n, line in enumerate(file, 1) if line.rstrip().endswith(f"# {comment}")]
    return f"{__file__}:{lines[0]}"


# --- deadlocks --------------------------------------------------------------------------------------------------------
def test_a_deadlock_tells_what_each_rank_waits_for():
    def body(comm):
        comm.compute()
        half = comm.split(comm.rank % 2)
        window = comm.window(1)
        if comm.rank == 0:
            half.irecv(torch.zeros(1), 1, 7).wait()  # receives
        elif comm.rank == 1:
            comm.probe()  # probes
        elif comm.rank == 3:
            half.barrier()  # meets
        elif comm.rank == 4:
            window.wait(lambda e: e[0] > 0, rank=5, what="the word of rank 5")  # watches
        elif comm.rank == 5:
            while comm.probe(4, 3, block=False) is None:  # polls
                pass

    with pytest.raises(DeadlockError) as raised:
        run_virtual(body, 6, compute=Constant(0.25))
    assert str(raised.value).splitlines() == [
        "no virtual rank can continue at 0.25 virtual s:",
        f"  rank 0 waits since 0.25 s for a message from rank 2, tag 7, at {here('receives')}",
        f"  rank 1 waits since 0.25 s for a message from any rank, any tag, at {here('probes')}",
        "  rank 2 has returned",
        f"  rank 3 waits since 0.25 s for barrier: ranks 1, 5 missing, at {here('meets')}",  # numbers in the run
        f"  rank 4 waits since 0.25 s for the word of rank 5, at {here('watches')}",
        f"  rank 5 waits since 0.25 s for (polling) a message from rank 4, tag 3, at {here('polls')}",
    ]


def test_a_deadlock_runs_finally_blocks_and_passes_by_except_blocks():
    ended = []

    def body(comm):
        try:
            comm.probe()
        except Exception:
            ended.append("wrong")
        finally:
            ended.append(comm.rank)

    with pytest.raises(DeadlockError):
        run_virtual(body, 3)
    assert ended == [0, 1, 2]
    assert run_virtual(lambda comm: comm.rank, 2) == [0, 1], "another run can follow"


def test_a_rank_that_spins_where_nothing_takes_time_is_ended_with_its_line(monkeypatch):
    monkeypatch.setattr(clock, "_STANDSTILL", 1000)

    def body(comm):
        lock = comm.window(1, torch.int64)
        while lock.compare_and_swap(0, 1, 0) != 0:  # spins
            pass
        comm.compute()
        lock.put(torch.zeros(1, dtype=torch.int64), 0)

    message = "1000 turns without any time passing, and rank 0 continues only at 0.5 s. Rank 1 is at "
    with pytest.raises(DeadlockError, match=message + re.escape(here("spins"))):
        run_virtual(body, 2, compute=Constant(0.5))


# --- deadlines --------------------------------------------------------------------------------------------------------
WAITS = [
    (lambda comm: comm.irecv(torch.zeros(1), 1, 2).wait(), "a message from rank 1, tag 2"),
    (lambda comm: comm.probe(1), "a message from rank 1, any tag"),
    (lambda comm: comm.barrier(), "barrier: rank 1 missing"),
    (lambda comm: comm.allreduce(torch.zeros(3)), "allreduce of 3 x torch.float32: rank 1 missing"),
]


@each("case", WAITS)
def test_a_wait_past_the_deadline_is_an_error_at_that_time(case):
    (call, whom), times = case, []

    def body(comm):
        if comm.rank == 0:
            comm.failures.deadline_s = 2.5
            comm.compute()
            try:
                call(comm)
            finally:
                times.append(comm.now())
        for _ in range(9):
            comm.compute()

    with pytest.raises(DeadlineError, match=f"rank 0 waited past the deadline of 2.5 virtual s for {whom}"):
        run_virtual(body, 2, compute=Constant(1.0))
    assert times == [3.5]


def test_a_deadline_that_is_kept_leaves_no_trace():
    def body(comm):
        comm.failures.deadline_s = 5.0
        window = comm.window(1)
        if comm.rank == 0:
            comm.compute()
            comm.isend(torch.ones(1), 1)
            window.put(torch.ones(1), 1)
        else:
            comm.irecv(torch.zeros(1)).wait()
            window.wait(lambda e: e[0] > 0)
        comm.barrier()
        return comm.now()

    assert run_virtual(body, 2, compute=Constant(1.0)) == [1.0, 1.0]


def test_a_rank_that_catches_its_deadline_goes_on():
    def body(comm):
        window = comm.window(1)
        if comm.rank == 0:
            with pytest.raises(DeadlineError, match="deadline of 0.5 virtual s for a sign of rank 1"):
                window.wait(lambda e: e[0] > 0, what="a sign of rank 1", deadline_s=0.5)
            assert comm.now() == 0.5
            comm.isend(torch.ones(1), 1)
        else:
            comm.irecv(torch.zeros(1), 0).wait()  # all wait, but a deadline is still to come: no deadlock
        return comm.now()

    assert run_virtual(body, 2) == [0.5, 0.5]


# --- exceptions -------------------------------------------------------------------------------------------------------
@each("size", [1, 5])
@each("error", [ValueError, SystemExit, pytest.fail.Exception])
def test_the_first_exception_ends_all_ranks_and_is_raised_with_its_rank(size, error):
    failing, ended = size - 1, []

    def body(comm):
        try:
            if comm.rank == failing:
                raise error("the reason")
            comm.barrier()
        finally:
            ended.append(comm.rank)
            comm.barrier()  # a call made on the way out ends at once

    with pytest.raises(error, match="the reason") as raised:
        run_virtual(body, size)
    assert raised.traceback[-1].name == "body"
    assert ended == [failing, *range(failing)]
    if sys.version_info >= (3, 11):
        assert raised.value.__notes__ == [f"raised on virtual rank {failing} of {size} at 0 virtual s"]


def test_errors_on_the_way_out_do_not_hide_the_first():
    def body(comm):
        try:
            comm.barrier()
            if comm.rank == 1:
                raise ValueError("first")
            comm.barrier()
        finally:
            if comm.rank != 1:
                raise RuntimeError("second")

    with pytest.raises(ValueError, match="first"):
        run_virtual(body, 3)


@pytest.fixture
def ctrl_c():
    """Ctrl-C raises KeyboardInterrupt; a shell's background jobs are started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_all_ranks(ctrl_c):
    ended = []

    def body(comm):
        try:
            while True:
                comm.compute()
                if comm.rank == 1 and comm.now() > 10:
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        finally:
            ended.append(comm.rank)

    with pytest.raises(KeyboardInterrupt):
        run_virtual(body, 3, compute=Constant(1.0))
    assert sorted(ended) == [0, 1, 2]
