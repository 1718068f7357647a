"""The asynchronous server: staleness by definition, no gradient lost, and the trajectory that follows from them."""

from __future__ import annotations

from functools import partial
from statistics import fmean

import pytest
import torch

from harness import loops
from harness.cases import each
from hpcdist import strategies
from hpcdist.comm.virtual import Constant, Exponential, Jitter, Network, Straggler
from hpcdist.model.flat import FlatModel
from strategies import problem
from strategies.problem import staleness
from strategies.replay import asynchronous, logged

pytestmark = pytest.mark.computes

NAME = "parameter_server"
_train = partial(problem.virtual, name=NAME)
OPTIMIZERS = each("optimizer", ["momentum", "adam"])
FAST = Network(latency_s=1e-5, bandwidth_bytes_s=1e9)


# --- staleness --------------------------------------------------------------------------------------------------------
@each("case", [(1, Constant(0.1)), (9, Exponential(0.1))])
def test_the_mean_staleness_is_the_number_of_workers_minus_one(case):
    workers, compute = case
    # Every update falls into every other worker's gradient under way; only the first and last gradients see fewer.
    runs = _train({}, workers + 1, batch=1, epochs=max(1, workers // 4), compute=compute, network=FAST)
    assert fmean(staleness(runs)) == pytest.approx(workers - 1, rel=0.12, abs=0.02)


@each("bound", [0, 5])
def test_a_bound_of_staleness_drops_and_counts(bound):
    runs = _train({"max_staleness": bound}, 4, batch=1, epochs=1, compute=Straggler(Constant(0.1), 1, 8.0))
    dropped = [record for record in runs[0].records if record.dropped]
    assert max(staleness(runs)) <= bound
    assert dropped and all(record.staleness == () for record in dropped)
    assert len(staleness(runs)) + sum(record.dropped for record in dropped) == sum(len(r.records) for r in runs[1:])
    assert all(f"updates old, max_staleness is {bound}" in record.event for record in dropped)
    assert "a gradient of rank 1 was" in dropped[-1].event


@each("workers", [1, 6])
def test_overlap_costs_as_many_updates_of_staleness_as_there_are_workers(workers):
    """A gradient is of the parameters that came with the last reply but one: two rounds of all, less itself."""
    runs = _train({"overlap": True}, workers + 1, batch=1, epochs=1, compute=Jitter(0.1, 0.2), network=FAST)
    assert fmean(staleness(runs)) == pytest.approx(2 * workers - 1, rel=0.15)
    assert len(staleness(runs)) == sum(len(run.records) for run in runs[1:]) == problem.SAMPLES


def test_overlap_hides_the_network():
    slow = {"compute": Constant(0.1), "network": Network(latency_s=1e-3, bandwidth_bytes_s=1e4)}
    apart_s, overlapped_s = (
        max(run.seconds for run in _train({"overlap": overlap}, 3, epochs=1, **slow)) for overlap in (False, True)
    )
    assert overlapped_s < 0.85 * apart_s  # pushing takes its time; only the reply travels meanwhile


# --- trajectories -----------------------------------------------------------------------------------------------------


@OPTIMIZERS
@each("servers", [1, 2, "colocated"])
def test_the_trajectory_is_that_of_the_recorded_arrivals(optimizer, servers):
    """Replaying who posted what, computed from which clocks, gives the servers' parameters to the bit."""
    cls = logged(strategies.load(NAME))
    slow = {"compute": Exponential(0.1), "network": Network(latency_s=0.03, bandwidth_bytes_s=1e6)}  # out of step
    size = 4 if servers == "colocated" else 3 + servers
    settings = {"optimizer": optimizer, "samples": 50}
    runs = problem.virtual({"servers": servers}, size, cls, epochs=1, seed=4, **settings, **slow)
    ranks = [rank for rank, run in enumerate(runs) if run.is_worker]
    expected = asynchronous(cls.arrivals, ranks, **settings)
    assert all(torch.equal(run.consensus[0], expected) for run in runs)
    late = [i - a.clock for log in cls.arrivals.values() for i, a in enumerate(log)]
    assert any(late), "no gradient was stale: the test shows nothing"
    assert sorted(late) == sorted(staleness(runs)), "staleness is recorded as something else"


@OPTIMIZERS
def test_it_is_downpour_that_pushes_and_fetches_at_every_step(optimizer):
    """To the bit in parameters, staleness and time, for the same order of arrival."""
    settings = {"optimizer": optimizer, "samples": 50, "compute": Exponential(0.1), "seed": 3}
    runs, others = (
        problem.virtual(options, 4, name, network=Network(1e-3, 1e8), **settings)
        for name, options in ((NAME, {}), ("downpour", {"server_rule": "optimizer"}))
    )
    assert torch.equal(runs[0].consensus[0], others[0].consensus[0])
    assert staleness(runs) == staleness(others) and max(staleness(runs)) > 2
    assert runs[0].seconds == others[0].seconds


class Mixed(torch.nn.Module):
    """Parameters of three dtypes, one of them complex, one frozen, one that has no gradient in some steps."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, shape, dtype in [
            ("a", (3, 2), torch.float32), ("b", (5,), torch.float64), ("c", (2,), torch.complex64),
            ("d", (4,), torch.float32), ("e", (1,), torch.bfloat16), ("f", (2,), torch.float64),
        ]:  # fmt: skip
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            setattr(self, name, torch.nn.Parameter(value, requires_grad=name != "f"))

    def backward(self, step):
        total = sum((p * p.conj()).real.sum().double() * (step + 1) for p in (self.a, self.b, self.c, self.e))
        (total if step % 2 else total + self.d.double().sum()).backward()


@OPTIMIZERS
@pytest.mark.sizes(4, 10)
@each("name", [NAME, "hardsync", "downpour"])
def test_one_worker_of_any_model_equals_one_process_to_the_bit(ranks, optimizer, name):
    """Several dtypes, more servers than some of them have elements, parameters without a gradient."""
    rule = {"server_rule": "optimizer"} if name == "downpour" else {}

    def trained(strategy, module):
        local = problem.OPTIMIZERS[optimizer](module.parameters())
        if strategy is None:
            loops.steps(local, range(4), module.backward)
        else:
            loops.by_strategy(strategy, local, range(4), module.backward)

    def body(comm):
        module = Mixed()
        strategy = problem.make(comm, name, module, servers=comm.size - 1, **rule)
        trained(strategy, module)
        params = strategy.consensus()[0]
        strategy.close()
        return params

    expected = FlatModel(Mixed())
    trained(None, expected.module)
    for params in ranks(body):
        assert all(torch.equal(a, b) for a, b in zip(params, expected.params, strict=True))


@pytest.mark.sizes(4)
def test_with_overlap_it_learns_and_all_ranks_agree_in_the_end(ranks):
    found = problem.learns(ranks, NAME, {"servers": 2, "overlap": True}, epochs=2, below=0.9, compute=Jitter(0.1, 0.2))
    posted = sum(len(run.records) for run in found if run.is_worker)
    assert len(staleness(found)) == 2 * posted


@pytest.mark.sizes(3)
def test_a_nan_gradient_is_left_out_on_the_server_too(ranks):
    """One worker, so that the others' gradients are those of one process that leaves that step out."""
    options = {"servers": ranks.size - 1, "on_nonfinite": "skip"}
    runs = ranks(lambda comm: problem.train(comm, NAME, options, poison={(0, 3)}, epochs=1))
    (expected,) = problem.serial(1, leave_out={(0, 3)}, epochs=1)
    assert all(torch.equal(run.consensus[0], expected) for run in runs)
    assert [record.step for record in runs[-1].records if record.event] == [4]
