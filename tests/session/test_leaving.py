"""When ranks leave: all after the same step, in time, whoever hears of it."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import hpcdist as hd
from comm.jobs_here import run
from harness.launch import find_mpirun
from hpcdist.comm.single_rank import SingleRankCommunicator
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
    leaving = Leaving(SingleRankCommunicator())
    with pytest.raises(ConfigError, match=r"hd.Leaving must be used as `with hd.Leaving.* outside of that block"):
        leaving.step_done()
    with leaving:
        assert leaving.step_done() is None


@pytest.mark.parametrize("strategy", ["allreduce", "hardsync", "parameter_server", "gossip_pull"])
@pytest.mark.parametrize("limited", [True, False])
def test_ranks_that_serve_learn_it_after_the_loop(strategy, limited):
    """Rank 0, which serves with some of these strategies, alone knows the limit."""

    def body(comm):
        hd.init(comm=comm)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        optimizer = hd.DistributedOptimizer(optimizer, model, strategy=strategy)
        loader = hd.shard(DataLoader(TensorDataset(torch.ones(120, 2), torch.ones(120, 1)), 4))
        ends_at, steps = 50.0 if comm.rank == 0 and limited else None, 0
        leaving = Leaving(comm, ends_at=ends_at, margin_s=5.0, every_s=2.0, clock=comm.now)
        epochs = 0
        while epochs < 5:
            epochs += 1
            for x, y in loader:
                comm.compute()
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                optimizer.step()
                steps += 1
                if leaving.step_done():
                    break
            if leaving.due():
                break
        return epochs, steps if optimizer.strategy.is_worker else None, leaving.reason, comm.now()

    epochs, steps, reasons, moments = zip(*run_virtual(body, 3, compute=Constant(1.0)))
    assert len(set(epochs)) == len(set(reasons)) == len({count for count in steps if count is not None}) == 1
    if limited:
        assert "the time limit, " in reasons[0] and 35 < max(moments) <= 45
    else:
        assert (epochs[0], reasons[0]) == (5, None)


# Each run is interrupted by a signal to its last rank, goes on from the checkpoint, and ends.
REQUEUED = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import hpcdist as hd

comm = hd.init()
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01, 0.9), model, strategy={strategy!r})
data = TensorDataset(torch.randn(240, 3), torch.randn(240, 1))
loader = hd.shard(DataLoader(data, 4, shuffle=True))
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
found = hd.load({folder!r}, optimizer=optimizer, schedule=schedule, loader=loader) if {interrupted} else None
steps = 0
with hd.Leaving(comm, ends_at="slurm", every_s=0.01) as leaving:
    for epoch in range(loader.next_epoch, 3):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            steps += 1
            if {interrupted} and found is None and (epoch, steps) == (1, {step}) and comm.rank == comm.size - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            if leaving.step_done():
                break
        if leaving.due():
            hd.save({folder!r}, optimizer=optimizer, schedule=schedule, loader=loader)
            sys.exit(75)
        schedule.step()
hd.finish(model)
if hd.is_main():
    print("found", steps, [p.tolist() for p in model.parameters()])
"""


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun is installed")
@pytest.mark.parametrize(
    ("strategy", "step"),
    [
        ("hardsync", 40),
        ("hardsync", 59),
        pytest.param("hardsync", 60, marks=pytest.mark.extended),
        pytest.param("allreduce", 25, marks=pytest.mark.extended),
        ("allreduce", 39),
        ("allreduce", 40),
    ],
)
def test_a_loop_that_left_goes_on_to_the_same_bits(tmp_path, strategy, step):
    def ended(interrupted: bool, status: int) -> list[str]:
        script = REQUEUED.format(strategy=strategy, interrupted=interrupted, folder=str(tmp_path / "saved"), step=step)
        done = run(tmp_path, script, 3)
        assert done.returncode == status, done.stderr
        assert ("hpcdist: left after step " in done.stderr) == (status == 75)
        return [line for line in done.stdout.splitlines() if line.startswith("found ")]

    (whole,) = ended(False, 0)
    assert ended(True, 75) == []
    (resumed,) = ended(True, 0)
    assert resumed.split(maxsplit=2)[2] == whole.split(maxsplit=2)[2]
    assert 0 < int(resumed.split()[1]) < int(whole.split()[1])


def test_another_end_is_refused():
    with pytest.raises(ConfigError, match="ends_at must be seconds since 1970, 'slurm' or None; got 'soon'"):
        Leaving(SingleRankCommunicator(), ends_at="soon")


def test_no_limit_and_no_signal_means_never():
    found = run_virtual(lambda comm: _walk(comm, Leaving(comm, clock=comm.now), 500), 2, compute=Jitter(1.0, 0.5))
    assert [(steps, reason) for steps, reason, _ in found] == [(500, None)] * 2


def test_ranks_meet_about_as_often_as_asked():
    def body(comm):
        leaving, meetings = Leaving(comm, every_s=5.0, clock=comm.now), []
        agree = leaving.agree
        leaving.agree = lambda steps: meetings.append(steps) or agree(steps)
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
