"""Synchronous data parallelism equals one process with all batches together."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
import torch

from harness import loops
from harness.cases import each
from hpcdist import collectives
from hpcdist.comm.virtual import Constant, Jitter, Network, run_virtual
from strategies import problem

pytestmark = pytest.mark.computes


@pytest.mark.sizes(3, 4)
@each("algorithm", collectives.available())
@each("case", [("momentum", 50), ("adam", 1)])
def test_by_every_algorithm_it_equals_one_process_with_the_global_batch(ranks, algorithm, case):
    """Steps in which ranks have fewer samples than others, or none."""
    optimizer, samples = case
    given = {"optimizer": optimizer, "samples": samples}
    if algorithm == "direct" and not all(ranks(lambda comm: comm.memory.can_attach)):
        pytest.skip("the ranks of this job can't read each other's memory")
    runs = ranks(lambda comm: problem.train(comm, "allreduce", {"algorithm": algorithm}, **given))
    (expected,) = problem.serial(len(runs), **given)
    for run in runs:
        assert torch.equal(run.params[0], runs[0].params[0]), "replicas drifted apart"
        torch.testing.assert_close(run.params[0], expected, rtol=0, atol=1e-12)


@pytest.mark.mpi(min_size=2)
@each("dtype", [torch.float32, torch.float64])
def test_overlap_changes_no_bit(ranks, dtype):
    def body(comm):
        return [
            problem.train(comm, "allreduce", {"overlap": overlap, "algorithm": "ring"}, dtype=dtype)
            for overlap in ("off", "on", "auto")
        ]

    for apart, beside, either in ranks(body):
        assert torch.equal(apart.params[0], beside.params[0])
        assert torch.equal(apart.params[0], either.params[0])


@pytest.mark.mpi(min_size=2)
@each("overlap", ["off", "on"])
def test_no_second_is_both_of_waiting_and_of_communicating(ranks, overlap):
    """Rank 0 is late for each step; a thread averages while the rank waits for it."""

    def body(comm):
        def late():
            return nullcontext(time.sleep(0.005 * (comm.rank == 0)))

        start = comm.now()
        run = problem.train(comm, "allreduce", {"overlap": overlap}, epochs=10, turns=late)
        return comm.now() - start, sum(record.seconds for record in run.records)

    for passed_s, recorded_s in ranks(body):
        assert 0 < recorded_s <= passed_s


@pytest.mark.mpi(min_size=2)
@each("overlap", ["off", "on"])
def test_long_gradients_are_averaged_where_all_ranks_have_mapped_them(ranks, overlap):
    """They are still there once the strategy is closed."""

    def body(comm):
        torch.manual_seed(1)
        module = torch.nn.Linear(700, 600)
        local = torch.optim.SGD(module.parameters(), lr=0.1)
        strategy = problem.make(comm, "allreduce", module, local, overlap=overlap)
        in_place = bool(strategy._calls.comm.memory.mapped(strategy.model.grads[0]))
        for step in range(3):
            before = loops.vector(module)
            local.zero_grad()
            torch.manual_seed(10 * step + comm.rank)
            module(torch.randn(4, 700)).square().mean().backward()
            strategy.step(local.step)
        strategy.close()
        mean = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
        return in_place == comm.memory.can_attach, before, loops.vector(module), mean

    results = ranks(body)
    total = None
    for rank, (as_expected, before, after, mean) in enumerate(results):
        assert as_expected and torch.equal(after, results[0][2]) and torch.equal(mean, results[0][3])
        torch.manual_seed(20 + rank)
        module = torch.nn.Linear(700, 600)
        torch.manual_seed(20 + rank)
        x = torch.randn(4, 700)
        torch.nn.utils.vector_to_parameters(before, module.parameters())
        module(x).square().mean().backward()
        own = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
        total = own if total is None else total + own
    torch.testing.assert_close(results[0][3], total / len(results), rtol=1e-5, atol=1e-8)


def test_virtual_time_is_the_slowest_rank_plus_the_all_reduce():
    """Synchronous: every step lasts as long as the slowest rank's computation."""

    def body(comm):
        run = problem.train(comm, "allreduce", {"algorithm": "ring"}, epochs=1)
        return run, comm.now()

    network = Network(latency_s=1e-3, bandwidth_bytes_s=1e9)
    (steady, steady_s), *_ = run_virtual(body, 4, network=network, compute=Constant(0.1))
    (_, jittered_s), *_ = run_virtual(body, 4, network=network, compute=Jitter(0.1, 0.3))
    steps = len(steady.records)
    assert steady_s > steps * (0.1 + 2 * 3 * 1e-3)
    assert steady_s < steps * 0.13
    assert jittered_s > 1.1 * steady_s
    assert all(record.staleness == (0,) for record in steady.records)
