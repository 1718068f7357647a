"""When ranks leave: all after the same step, in time, whoever hears of it."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdist.comm.alone import Alone
from hpcdist.comm.virtual import Constant, Jitter, run_virtual
from hpcdist.errors import ConfigError
from hpcdist.session.leaving import SIGNALS, Leaving


def _walk(comm, leaving, most):
    """Steps of a user's own loop until it is to leave: their number, the reason and the moment."""
    for step in range(1, most + 1):
        comm.compute()
        reason = leaving.step_done()
        if reason:
            return step, reason, comm.now()
    return most, None, comm.now()


@settings(max_examples=10, deadline=None)
@given(
    step_s=st.floats(0.1, 20.0),
    margin_s=st.floats(0.0, 60.0),
    cost_s=st.floats(0.0, 60.0),
    every_s=st.floats(0.1, 10.0),
    knows=st.integers(0, 2),
)
def test_all_leave_before_the_limit_with_time_for_the_checkpoint(step_s, margin_s, cost_s, every_s, knows):
    """Also where one rank alone knows the limit, and another one's checkpoint is the slow one."""
    ends_at = 300.0

    def body(comm):
        leaving = Leaving(
            comm,
            ends_at=ends_at if comm.rank == knows else None,
            margin_s=margin_s,
            every_s=every_s,
            cost_s=lambda: cost_s if comm.rank == 2 else 0.0,
            clock=comm.now,
        )
        return _walk(comm, leaving, 100_000)

    found = run_virtual(body, 3, compute=Constant(step_s))
    steps, reasons, moments = zip(*found)
    assert len(set(steps)) == len(set(reasons)) == 1 and "the time limit, " in reasons[0]
    assert max(moments) <= ends_at - margin_s - cost_s + 1e-3, "too late"
    # Not earlier than needed, either: what is left is the margin, the checkpoint and the steps up to another meeting.
    assert max(moments) >= ends_at - margin_s - cost_s - 2 * max(every_s, step_s) - step_s


def test_without_its_block_it_would_hear_no_signal_and_is_refused():
    leaving = Leaving(Alone())
    with pytest.raises(ConfigError, match=r"hd.Leaving must be used as `with hd.Leaving.* outside of that block"):
        leaving.step_done()
    with leaving:
        assert leaving.step_done() is None


def test_no_limit_and_no_signal_means_never():
    found = run_virtual(lambda comm: _walk(comm, Leaving(comm, clock=comm.now), 500), 2, compute=Jitter(1.0, 0.5))
    assert [(steps, reason) for steps, reason, _ in found] == [(500, None)] * 2


def test_ranks_meet_about_as_often_as_asked():
    def body(comm):
        leaving, meetings = Leaving(comm, every_s=5.0, clock=comm.now), []
        meet = leaving.meet
        leaving.meet = lambda steps: meetings.append(steps) or meet(steps)
        _walk(comm, leaving, 1000)
        return meetings

    first, second = run_virtual(body, 2, compute=Constant(0.1))
    assert first == second
    assert first[:4] == [1, 4, 16, 49], "further apart each time, until they are 5 s apart (a step takes 0.1 s or more)"
    assert set(first[3:]) <= {49, 50}


@pytest.mark.mpi
@pytest.mark.sizes(1, 4)
@pytest.mark.parametrize("number", SIGNALS)
def test_what_one_rank_hears_makes_all_leave_after_the_same_step(ranks, number):
    def body(comm):
        before = [signal.getsignal(s) for s in SIGNALS]
        with Leaving(comm, every_s=0.01) as leaving:
            for step in range(1, 100_000):
                if step == 20 and comm.rank == comm.size - 1:
                    os.kill(os.getpid(), number)
                if leaving.step_done():
                    break
        assert [signal.getsignal(s) for s in SIGNALS] == before, "the signals mean again what they did"
        return step, leaving.reason

    found = ranks(body)
    assert len(set(found)) == 1
    step, reason = found[0]
    assert reason == f"{number.name} on rank {len(found) - 1}" and 20 <= step < 99_999
