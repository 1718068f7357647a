"""The asynchronous server: staleness by definition, no gradient lost, and the trajectory that follows from them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from strategies import problem

from hpcdist.comm.virtual import Constant, Exponential, Jitter, Network, Straggler, run_virtual

NAME = "parameter_server"


def _staleness(runs):
    return [s for run in runs for record in run.records for s in record.staleness]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8, 15])
@pytest.mark.parametrize("compute", [Constant(0.1), Jitter(0.1, 0.2), Exponential(0.1)], ids=repr)
def test_the_mean_staleness_is_the_number_of_workers_minus_one(workers, compute):
    # Every update falls into every other worker's gradient under way; only the first and last gradients see fewer.
    samples = workers * 4 * 60
    runs = run_virtual(
        lambda comm: problem.train(comm, NAME, samples=240, batch=1, epochs=max(1, samples // 960)),
        workers + 1,
        compute=compute,
        network=Network(latency_s=1e-5, bandwidth_bytes_s=1e9),
    )
    staleness = _staleness(runs)
    assert sum(staleness) / len(staleness) == pytest.approx(workers - 1, rel=0.12, abs=0.02)


def test_equal_workers_have_equal_staleness():
    runs = run_virtual(lambda comm: problem.train(comm, NAME, batch=1, epochs=1), 5, compute=Constant(0.1))
    counts = Counter(_staleness(runs))
    assert counts[3] > 0.95 * sum(counts.values())


def test_a_straggler_exceeds_any_bound():
    runs = run_virtual(
        lambda comm: problem.train(comm, NAME, batch=1, epochs=1), 5, compute=Straggler(Constant(0.1), 1, 10.0)
    )
    assert max(_staleness(runs)) > 2 * 4


@pytest.mark.sizes(2, 3, 4)
def test_no_gradient_is_lost(ranks):
    runs = ranks(lambda comm: problem.train(comm, NAME, epochs=2))
    server, workers = runs[0], runs[1:]
    pushed = sum(len(run.records) for run in workers)
    assert not server.is_worker and len(server.records) == pushed
    assert [record.clock for record in server.records] == list(range(1, pushed + 1))
    assert sorted(server.consensus[0].tolist()) == sorted(server.params[0].tolist())


@pytest.mark.sizes(2, exact=True)
def test_one_worker_equals_one_process_to_the_bit(ranks):
    runs = ranks(lambda comm: problem.train(comm, NAME, optimizer="adam"))
    (expected,) = problem.serial(1, optimizer="adam")
    assert all(torch.equal(run.consensus[0], expected) for run in runs)
    assert _staleness(runs) == [0] * len(runs[0].records)


def test_the_trajectory_is_that_of_the_recorded_arrivals():
    """Replaying who pushed what, computed from which clock, gives the server's parameters to the bit."""
    workers, log = 3, []
    import hpcdist.strategies.parameter_server as module_under_test

    apply = module_under_test.ParameterServer._apply

    def logged(self, letter, update):
        log.append((letter.worker, letter.clock, [t.clone() for t in letter.tensors]))
        apply(self, letter, update)

    module_under_test.ParameterServer._apply = logged
    try:
        runs = run_virtual(
            lambda comm: problem.train(comm, NAME, epochs=1), workers + 1, compute=Exponential(0.1), seed=4
        )
    finally:
        module_under_test.ParameterServer._apply = apply
    module = problem.model()
    local = problem.OPTIMIZERS["momentum"](module.parameters())
    history = [torch.cat([p.detach().reshape(-1) for p in module.parameters()])]
    plan = problem.EpochPlan(problem.SAMPLES, workers, 4, seed=1)
    steps = Counter()
    for worker, clock, tensors in log:
        _load(module, history[clock])
        local.zero_grad()
        problem.loss(module, plan.indices(steps[worker], worker - 1)).backward()
        steps[worker] += 1
        gradient = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
        assert torch.equal(gradient, tensors[0]), "not the gradient at the parameters of its clock"
        _load(module, history[-1])
        local.step()
        history.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]))
    assert torch.equal(history[-1], runs[0].params[0])
    assert any(clock != i for i, (_, clock, _) in enumerate(log)), "no gradient was stale: the test shows nothing"


def _load(module, flat):
    with torch.no_grad():
        for parameter, values in zip(
            module.parameters(), flat.split([p.numel() for p in module.parameters()]), strict=True
        ):
            parameter.copy_(values.view(parameter.shape))
