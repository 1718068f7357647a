"""Synchronous data parallelism equals one process with all batches together."""

from __future__ import annotations

import pytest
import torch

from harness import loops
from harness.cases import each
from hpcdist import collectives, strategies
from hpcdist.comm.virtual import Constant, Jitter, Network, run_virtual
from hpcdist.model.flat import FlatModel
from strategies import problem

pytestmark = pytest.mark.computes


@pytest.mark.sizes(2, 5)
@each("optimizer", ["momentum", "adam"])
def test_it_equals_one_process_with_the_global_batch(ranks, optimizer):
    # 240 samples in batches of 4: uneven last steps on most sizes, so samples are weighted too.
    runs = ranks(lambda comm: problem.train(comm, "allreduce", optimizer=optimizer))
    (expected,) = problem.serial(len(runs), optimizer=optimizer)
    for run in runs:
        assert torch.equal(run.params[0], runs[0].params[0]), "replicas drifted apart"
        torch.testing.assert_close(run.params[0], expected, rtol=0, atol=1e-12)


@pytest.mark.sizes(3)
@each("samples", [1, 5, 7])
def test_an_epoch_smaller_than_a_step_is_weighted_by_samples(ranks, samples):
    runs = ranks(lambda comm: problem.train(comm, "allreduce", samples=samples, epochs=5))
    (expected,) = problem.serial(len(runs), samples=samples, epochs=5)
    for run in runs:
        torch.testing.assert_close(run.params[0], expected, rtol=0, atol=1e-12)


@each("size", [3, 8])
def test_it_equals_the_sum_in_rank_order_to_the_bit(size):
    """The same gradients added one after the other, rank 0 first, as a server would."""
    runs = run_virtual(lambda comm: problem.train(comm, "allreduce", {"algorithm": "native"}, epochs=1), size)
    module = problem.model()
    local = problem.OPTIMIZERS["momentum"](module.parameters())
    plan = problem.EpochPlan(problem.SAMPLES, size, 4, seed=1)
    for step in range(plan.steps):
        total, sizes = None, plan.sizes(step)
        for worker in range(size):
            local.zero_grad()
            problem.loss(module, plan.indices(step, worker)).backward()
            weight = sizes[worker] * size / sum(sizes)
            grads = [p.grad * weight if weight != 1.0 else p.grad.clone() for p in module.parameters()]
            total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        for parameter, gradient in zip(module.parameters(), total, strict=True):
            parameter.grad = gradient / size
        local.step()
    assert all(torch.equal(run.params[0], loops.vector(module)) for run in runs)


@pytest.mark.sizes(3, 4)
@each("algorithm", collectives.available())
def test_every_algorithm_gives_the_same_training(ranks, algorithm):
    if algorithm == "direct" and not all(ranks(lambda comm: comm.memory.can_attach)):
        pytest.skip("the ranks of this job can't read each other's memory")
    runs = ranks(lambda comm: problem.train(comm, "allreduce", {"algorithm": algorithm}, samples=50))
    (expected,) = problem.serial(len(runs), samples=50)
    for run in runs:
        assert torch.equal(run.params[0], runs[0].params[0])
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
def test_long_gradients_are_averaged_where_all_ranks_have_mapped_them(ranks, overlap):
    """They are still there once the strategy is closed."""

    def body(comm):
        torch.manual_seed(1)
        module = torch.nn.Linear(700, 600)
        local = torch.optim.SGD(module.parameters(), lr=0.1)
        strategy = problem.make(comm, "allreduce", module, local, overlap=overlap)
        in_place = strategy._channel.memory.is_shared(strategy.model.grads[0])
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


class _Branches(torch.nn.Module):
    """Ranks go different ways; the last layer is used by nobody."""

    def __init__(self):
        super().__init__()
        self.ways = torch.nn.ModuleList(torch.nn.Linear(3, 1, dtype=torch.float64) for _ in range(3))

    def forward(self, x, way):
        return self.ways[way](x)


@pytest.mark.sizes(3)
@each("overlap", ["off", "on"])
def test_parameters_that_only_some_ranks_use(ranks, overlap):
    """As in a plain run on all samples: used ones are averaged, unused ones get no update, not even weight decay."""

    def body(comm):
        torch.manual_seed(5)
        module = _Branches()
        before = module.ways[2].weight.clone()
        local = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.1)
        cls = strategies.load("allreduce")
        strategy = cls(cls.Config(overlap=overlap), comm.split(0), FlatModel(module, first_bucket_bytes=8))
        x = torch.ones(2, 3, dtype=torch.float64)
        for _ in range(3):
            local.zero_grad()
            module(x, comm.rank % 2).sum().backward()
            strategy.step(local.step)
        strategy.close()
        assert torch.equal(before, module.ways[2].weight), "weight decay on a parameter without a gradient"
        return loops.vector(module)

    found = ranks(body)
    torch.manual_seed(5)
    module = _Branches()
    local = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.1)
    x = torch.ones(2, 3, dtype=torch.float64)
    for _ in range(3):
        local.zero_grad()
        sum(module(x, rank % 2).sum() for rank in range(len(found))).div(len(found)).backward()
        local.step()
    for params in found:
        torch.testing.assert_close(params, loops.vector(module), rtol=0, atol=1e-12)


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
