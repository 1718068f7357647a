"""Compressed gradients lead to the same parameters through servers and through all-reduce."""

from __future__ import annotations

import pytest
import torch

from hpcdist import strategies
from hpcdist.comm.virtual import Exponential, run_virtual
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from strategies import problem

pytestmark = pytest.mark.computes

STEPS = 12
DGC = {"name": "dgc", "ratio": 0.1, "values": "fp64"}


def _steps(comm, name: str, options: dict) -> list[torch.Tensor]:
    """The parameters after each step of a worker, whose batches are its own; of a server none."""
    cls, module, channel = strategies.load(name), problem.model(), comm.split(0)
    strategy = cls(cls.Config(**options), channel, FlatModel(module))
    local, found = torch.optim.SGD(module.parameters(), lr=0.02), []
    if strategy.is_worker:
        worker = strategy.config.workers(comm.size).index(comm.rank)
        for step in range(STEPS):
            comm.compute()
            local.zero_grad()
            first = (7 * step + 50 * worker) % 200
            problem.loss(module, range(first, first + 10)).backward()
            strategy.step(local.step)
            found.append(strategy.model.params[0].clone())
        strategy.pause()
    else:
        strategy.serve(local.step)
    strategy.close()
    channel.close()
    return found


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"warmup_steps": 5},
        {"warmup_steps": 3, "ramp_steps": 4, "nesterov": True},
        {"warmup_steps": 100},
        {"warmup_steps": 4, "masking": False, "clip_norm": 0.1},
        {"warmup_steps": 4, "warmup_ranks": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("workers", [2, 3])
def test_deep_gradient_compression_step_by_step(workers, more):
    compression = {**DGC, **more}
    served = run_virtual(
        lambda comm: _steps(comm, "hardsync", {"compression": compression, "compress_answers": False}),
        workers + 1,
        compute=Exponential(0.1),
    )
    reduced = run_virtual(lambda comm: _steps(comm, "allreduce", {"compression": compression}), workers)
    assert [len(found) for found in served] == [0] + [STEPS] * workers
    for step in range(STEPS):
        torch.testing.assert_close(served[1][step], reduced[0][step], rtol=0, atol=1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("name", "size"), [("allreduce", 3), ("hardsync", 2), ("hardsync", 4)])
def test_its_warmup_is_sgd_with_momentum(name, size, nesterov):
    """By one worker or several; the optimiser has no momentum of its own."""
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
        expected = torch.cat([p.detach().flatten() for p in module.parameters()])
        torch.testing.assert_close(found[step], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "compression"), [("hardsync", "terngrad"), ("softsync", "ef_signsgd"), ("parameter_server", "terngrad")]
)
@pytest.mark.sizes(3)
def test_gradients_to_servers_may_be_of_few_bits(ranks, name, compression):
    options = {"compression": compression, "compress_answers": False}
    problem.learns(ranks, name, options, epochs=6, below=0.9, compute=Exponential(0.1))


@pytest.mark.parametrize("name", ["hardsync", "easgd"])
def test_what_goes_without_feedback_does_not_code_differences(name):
    def body(comm):
        problem.make(comm, name, problem.model(), compression="terngrad")

    with pytest.raises(ConfigError, match="must lose less than there is where differences .* got terngrad"):
        run_virtual(body, 2)


@pytest.mark.parametrize("compression", ["terngrad", "ef_signsgd"])
@pytest.mark.sizes(1, 3)
def test_updates_may_be_of_few_bits(ranks, compression):
    problem.learns(ranks, "strom", {"compression": compression}, epochs=8, below=0.9, compute=Exponential(0.1))
