"""Hardsync: the all-reduce through a server. Nothing is stale, everyone waits, sums are in rank order."""

from __future__ import annotations

import pytest
import torch

from hpcdist.comm.virtual import Constant, Exponential, Straggler, run_virtual
from strategies import problem

pytestmark = pytest.mark.computes

NAME = "hardsync"
OPTIMIZERS = pytest.mark.parametrize("optimizer", ["momentum", "adam"])


def _train(options, size, **settings):
    simulation = {key: settings.pop(key) for key in ("compute", "seed") if key in settings}
    return run_virtual(lambda comm: problem.train(comm, NAME, options, **settings), size, **simulation)


def _size(workers, servers):
    return workers if servers == "colocated" else workers + servers


@OPTIMIZERS
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 1), (4, 3), (5, "colocated")])
def test_it_equals_one_process_with_all_batches_together(optimizer, workers, servers):
    settings = {"optimizer": optimizer, "batch": 2, "samples": 101, "epochs": 50 // -(-101 // (2 * workers)) + 1}
    runs = _train({"servers": servers}, _size(workers, servers), compute=Exponential(0.1), **settings)
    (expected,) = problem.serial(workers, **settings)
    assert len(runs[0].records) >= 50
    for run in runs:
        torch.testing.assert_close(run.consensus[0], expected, rtol=0, atol=1e-12)
        assert torch.equal(run.consensus[0], runs[0].consensus[0])


@OPTIMIZERS
@pytest.mark.parametrize("workers", [2, 3, 7])
@pytest.mark.parametrize("servers", [1, 3, "colocated"])
def test_it_equals_allreduce_in_rank_order_to_the_bit(optimizer, workers, servers):
    settings = {"optimizer": optimizer, "samples": 50}  # some workers have fewer in the last step, or none
    runs = _train({"servers": servers}, _size(workers, servers), compute=Exponential(0.1), **settings)
    reduced = run_virtual(lambda comm: problem.train(comm, "allreduce", {"algorithm": "native"}, **settings), workers)
    assert all(torch.equal(run.consensus[0], reduced[0].params[0]) for run in runs)
    assert all(torch.equal(run.params[0], reduced[0].params[0]) for run in runs if run.is_worker)


@OPTIMIZERS
@pytest.mark.sizes(2, 3, 4)
def test_on_these_ranks_it_equals_allreduce_to_the_bit(ranks, optimizer):
    algorithm = "direct" if ranks.real else "native"  # both sum in rank order
    settings = {"optimizer": optimizer, "samples": 50}

    def body(comm):
        if ranks.real and not comm.memory.can_attach:
            pytest.skip("the kernel lets no rank read another one's memory")
        served = problem.train(comm, NAME, {"servers": "colocated"}, **settings)
        reduced = problem.train(comm, "allreduce", {"algorithm": algorithm, "overlap": "off"}, **settings)
        return torch.equal(served.consensus[0], reduced.params[0])

    assert all(ranks(body))


@pytest.mark.parametrize("fan_in", [2, 3])
@pytest.mark.parametrize("size", [5, 8, 16])
def test_a_tree_equals_one_process_to_rounding(fan_in, size):
    settings = {"batch": 2, "samples": 101, "epochs": 2}
    runs = _train({"fan_in": fan_in}, size, compute=Exponential(0.1), **settings)
    workers = sum(run.is_worker for run in runs)
    assert workers < size - 1, "no aggregator: the test shows nothing"
    (expected,) = problem.serial(workers, **settings)
    for run in runs:
        torch.testing.assert_close(run.consensus[0], expected, rtol=0, atol=1e-12)
    assert set(runs[0].staleness) == {0}
    assert len(runs[0].staleness) == 2 * (101 // (2 * workers) * workers + -(-(101 % (2 * workers)) // 2))


@pytest.mark.parametrize("options", [{}, {"servers": 3}, {"servers": "colocated"}, {"fan_in": 2}], ids=str)
def test_no_gradient_is_ever_stale(options):
    runs = _train(options, 8, compute=Straggler(Exponential(0.1), 7, 4.0))
    assert {s for run in runs for s in run.staleness} == {0}


@pytest.mark.parametrize(
    ("options", "size"), [({}, 4), ({"servers": 2}, 5), ({"servers": "colocated"}, 3), ({"fan_in": 2}, 6)], ids=str
)
def test_a_nan_gradient_is_left_out_and_the_others_are_averaged(options, size):
    """Of worker 1 in step 4; in step 7 nobody has a gradient that counts."""
    poison = {(1, 3), (0, 6), (1, 6), (2, 6)}
    settings = {"epochs": 1, "batch": 4, "samples": 120}
    runs = _train({**options, "on_nonfinite": "skip"}, size, compute=Exponential(0.1), poison=poison, **settings)
    workers = [run for run in runs if run.is_worker]
    assert len(workers) == 3
    (expected,) = problem.serial(3, leave_out=poison, **settings)
    for run in runs:
        torch.testing.assert_close(run.consensus[0], expected, rtol=0, atol=1e-12)
    skipped = [[record.step for record in run.records if record.event] for run in workers]
    assert skipped == [[7], [4, 7], [7]]


def test_everyone_waits_for_the_slowest():
    steps = problem.SAMPLES // (3 * 4)
    runs = _train({}, 4, epochs=1, compute=Straggler(Constant(0.1), 2, 5.0))
    assert runs[0].seconds == pytest.approx(0.5 * steps, rel=1e-6)
    waiting = [sum(record.waiting_s for record in run.records) for run in runs]
    assert waiting[1] == waiting[3] == pytest.approx(0.4 * steps, rel=1e-6)
    assert waiting[2] == pytest.approx(0.0, abs=1e-6)
    assert all(len(run.records) == steps for run in runs)


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("servers", [1, 2, "colocated"])
def test_it_equals_one_process_on_these_ranks(ranks, servers):
    if servers == 2 and ranks.size == 2:
        servers = 1
    workers = ranks.size if servers == "colocated" else ranks.size - servers
    runs = ranks(lambda comm: problem.train(comm, NAME, {"servers": servers}, samples=50))
    (expected,) = problem.serial(workers, samples=50)
    for run in runs:
        torch.testing.assert_close(run.consensus[0], expected, rtol=0, atol=1e-12)
        assert torch.equal(run.consensus[0], runs[0].consensus[0])
