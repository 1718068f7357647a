"""Compression between workers and servers: it learns, sends less, and changes nothing else."""

from __future__ import annotations

import pytest
import torch

from harness import loops
from harness.cases import each
from harness.worlds import saved, take_up
from hpcdist.comm.virtual import Exponential, run_virtual
from strategies import problem

pytestmark = pytest.mark.computes

GRADIENTS = {"hardsync": {}, "softsync": {"splits": 2}, "parameter_server": {}, "ssp": {"bound": 1}}
SERVED = {**GRADIENTS, "downpour": {"n_push": 2, "n_fetch": 3}, "easgd": {}, "eamsgd": {"period": 2, "momentum": 0.5}}
EACH = each("name", SERVED)
DENSITY = {"name": "threshold", "density": 0.1}
TOPK = {"name": "topk", "ratio": 0.1}
ALL = {"name": "topk", "ratio": 1.0, "values": "fp64"}  # never shorter than the tensor: all is sent as it is


def _train(name, options, size, **settings):
    settings = {"optimizer": "sgd", "epochs": 2, "compute": Exponential(0.1), **settings}
    return problem.virtual({**SERVED[name], **options}, size, name, **settings)


# --- what comes out ---------------------------------------------------------------------------------------------------
LEARN = [
    ("softsync", {"compression": TOPK}),
    ("hardsync", {"compression": DENSITY, "servers": 2}),
    ("hardsync", {"compression": TOPK, "fan_in": 2}),
    ("softsync", {"compression": TOPK, "fan_in": 2, "compress_replies": False}),
    ("hardsync", {"compression": "terngrad", "compress_replies": False}),
    ("downpour", {"compression": DENSITY, "servers": 2}),
    ("eamsgd", {"compression": TOPK}),
    ("strom", {"compression": "ef_signsgd"}),
]


@each("case", LEARN)
@pytest.mark.sizes(4)
def test_it_learns(ranks, case):
    """Along trees, to several servers, with few bits, too."""
    name, options = case
    problem.learns(ranks, name, SERVED.get(name, {}) | options, epochs=2, below=0.95, compute=Exponential(0.1))


@each("case", [(name, (2, "colocated")[number % 2]) for number, name in enumerate(SERVED)])
def test_what_is_sent_as_it_is_changes_nothing(case):
    """Neither do messages that would be longer than the tensors; elastic averaging adds what the centre lacks."""
    name, servers = case
    dense, coded = (
        _train(name, {"servers": servers, **options}, 4, samples=50, epochs=1) for options in ({}, {"compression": ALL})
    )
    for a, b in zip(dense, coded, strict=True):
        torch.testing.assert_close(a.consensus[0], b.consensus[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(a.params[0], b.params[0], rtol=0, atol=1e-12)
        assert a.staleness == b.staleness


@each("case", [(name, (DENSITY, "fp16")[number % 2]) for number, name in enumerate(SERVED)])
def test_it_sends_less(case):
    """Of a model of 7 kB, in one-sided calls of a few words beside the messages."""
    name, compression = case

    def sent(options):
        def body(comm):
            module = torch.nn.Linear(30, 60, bias=False)
            local = torch.optim.SGD(module.parameters(), lr=0.01)
            strategy = problem.make(comm, name, module, **SERVED[name], **options)
            before = strategy.comm.trace.traffic.bytes_sent

            def backward(step):
                module.weight.grad = torch.randn(60, 30)

            loops.by_strategy(strategy, local, range(12), backward)
            spent = strategy.comm.trace.traffic.bytes_sent - before
            strategy.close()
            return spent

        return sum(run_virtual(body, 3))

    whole, both, letters = (
        sent(options)
        for options in ({}, {"compression": compression}, {"compression": compression, "compress_replies": False})
    )
    assert both < letters < whole
    assert both < (0.55 if compression == "fp16" else 0.2) * whole


# --- gradients that don't count ---------------------------------------------------------------------------------------
@EACH
@pytest.mark.sizes(3)
def test_a_nan_stays_out_of_what_is_left_to_be_sent(ranks, name):
    options = {**SERVED[name], "compression": TOPK, "on_nonfinite": "skip"}
    poison = {(1, 3), (0, 6), (1, 6)}
    runs = ranks(lambda comm: problem.train(comm, name, options, optimizer="sgd", poison=poison, epochs=1))
    assert all(torch.isfinite(run.params[0]).all() and torch.isfinite(run.consensus[0]).all() for run in runs)
    assert sum(bool(record.event) for run in runs for record in run.records) == len(poison)


@each("name", GRADIENTS)
@pytest.mark.sizes(4)
def test_while_it_warms_up_only_some_workers_count(ranks, name):
    compression = {"name": "topk", "ratio": 0.2, "warmup_steps": 5, "warmup_ranks": 1}
    options = {**SERVED[name], "compression": compression}
    runs = ranks(lambda comm: problem.train(comm, name, options, optimizer="sgd", epochs=1))
    dropped = [[record.step for record in run.records if record.dropped] for run in runs if run.is_worker]
    assert dropped == [[], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]
    events = {record.event for run in runs for record in run.records if record.dropped}
    assert events == {"dropped: a gradient of the warm-up, in which only 1 workers' count"}
    applied = sum(len(run.staleness) for run in runs)
    assert applied + sum(run.pending for run in runs) == problem.SAMPLES // 4 - 10


# --- another world ----------------------------------------------------------------------------------------------------


def _after_five_steps(comm, options):
    """The state of hardsync, and how many workers there are."""
    module = problem.model()
    strategy, local = problem.make(comm, "hardsync", module, **options), torch.optim.SGD(module.parameters(), lr=0.02)

    def backward(step):
        problem.loss(module, range(10 * comm.rank + step, 10 * comm.rank + step + 10)).backward()

    loops.by_strategy(strategy, local, range(5), backward)
    found = saved(strategy)
    strategy.close()
    return found, strategy.roles


def _flat(named):
    return torch.cat([chunk.tensor.reshape(-1) for chunk in named.values()])


def test_in_a_world_of_another_size_no_gradient_that_was_not_sent_is_lost():
    """What is left on the workers and aggregators, as a mean over the workers, stays what it is."""
    options = {"compression": {"name": "topk", "ratio": 0.05}, "fan_in": 2}
    found = run_virtual(lambda comm: _after_five_steps(comm, options), 6)
    states, roles = [state for state, _ in found], found[0][1]
    assert len(roles.workers) >= 2 and roles.aggregators
    left = sum(_flat(state.at("strategy", "requests.whole")) for state in states[1:])
    assert left.abs().max() > 0

    def smaller(comm):
        strategy = problem.make(comm, "hardsync", problem.model(), **options)
        take_up(strategy, states)
        residual = [part.clone() for part in strategy.state.save()["requests.whole"]]
        strategy.close()
        return residual

    for (residual,) in run_virtual(smaller, 3)[1:]:
        torch.testing.assert_close(residual, left / len(roles.workers), rtol=0, atol=1e-15)


# --- as all-reduce ----------------------------------------------------------------------------------------------------
STEPS = 12
DGC = {"name": "dgc", "ratio": 0.1, "values": "fp64"}


def _steps(comm, name: str, options: dict) -> list[torch.Tensor]:
    """The parameters after each step of a worker, whose batches are its own; of a server none."""
    module = problem.model()
    strategy, local = problem.make(comm, name, module, **options), torch.optim.SGD(module.parameters(), lr=0.02)
    workers, found = strategy.config.workers(comm.size), []

    def backward(step):
        first = (7 * step + 50 * workers.index(comm.rank)) % 200
        problem.loss(module, range(first, first + 10)).backward()

    loops.by_strategy(strategy, local, range(STEPS), backward, after=lambda step: found.append(loops.vector(module)))
    strategy.close()
    return found


@each("more", [
    {},
    {"warmup_steps": 3, "ramp_steps": 4, "nesterov": True},
    {"warmup_steps": 4, "masking": False, "clip_norm": 0.1},
    {"warmup_steps": 4, "warmup_ranks": 1},
])  # fmt: skip
def test_deep_gradient_compression_step_by_step(more):
    options = {"compression": {**DGC, **more}}
    served = run_virtual(
        lambda comm: _steps(comm, "hardsync", {**options, "compress_replies": False}), 4, compute=Exponential(0.1)
    )
    reduced = run_virtual(lambda comm: _steps(comm, "allreduce", options), 3)
    assert [len(found) for found in served] == [0] + [STEPS] * 3
    for step in range(STEPS):
        torch.testing.assert_close(served[1][step], reduced[0][step], rtol=0, atol=1e-12)


@each("nesterov", [True, False])
@each("case", [("allreduce", 3), ("hardsync", 2), ("hardsync", 4)])
def test_its_warmup_is_sgd_with_momentum(case, nesterov):
    """By one worker or several; the optimiser has no momentum of its own."""
    name, size = case
    compression = {**DGC, "momentum": 0.8, "nesterov": nesterov, "warmup_steps": STEPS}
    found = run_virtual(lambda comm: _steps(comm, name, {"compression": compression}), size)[-1]
    workers, module = size - (name == "hardsync"), problem.model()
    local = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.8, nesterov=nesterov)
    for step in range(STEPS):
        local.zero_grad()
        for worker in range(workers):
            first = (7 * step + 50 * worker) % 200
            (problem.loss(module, range(first, first + 10)) / workers).backward()
        local.step()
        torch.testing.assert_close(found[step], loops.vector(module), rtol=0, atol=1e-12)
