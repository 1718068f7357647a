"""Compression between workers and servers: it learns, sends less, is taken up to the bit, and changes nothing else."""

from __future__ import annotations

import pytest
import torch

from harness.worlds import saved, take_up
from hpcdist import strategies
from hpcdist.comm.virtual import Exponential, run_virtual
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from strategies import problem
from train import tiny

pytestmark = pytest.mark.computes

GRADIENTS = {"hardsync": {}, "softsync": {"splits": 2}, "parameter_server": {}, "ssp": {"bound": 1}}
SERVED = {**GRADIENTS, "downpour": {"n_push": 2, "n_fetch": 3}, "easgd": {}, "eamsgd": {"period": 2, "momentum": 0.5}}
EACH = pytest.mark.parametrize("name", SERVED)
DENSITY = {"name": "threshold", "density": 0.1}
TOPK = {"name": "topk", "ratio": 0.1}
ALL = {"name": "topk", "ratio": 1.0, "values": "fp64"}  # never shorter than the tensor: all is sent as it is


def _train(name, options, size, **settings):
    body_settings = {"optimizer": "sgd", "epochs": 2, **settings}
    return run_virtual(
        lambda comm: problem.train(comm, name, {**SERVED[name], **options}, **body_settings),
        size,
        compute=Exponential(0.1),
    )


def _bytes(runs):
    return sum(record.bytes_sent for run in runs for record in run.records)


# --- what comes out ---------------------------------------------------------------------------------------------------
@EACH
@pytest.mark.parametrize("compression", [TOPK, "fp16"], ids=str)
@pytest.mark.sizes(3)
def test_it_learns(ranks, name, compression):
    problem.learns(ranks, name, {**SERVED[name], "compression": compression}, epochs=4, below=0.9)


@EACH
@pytest.mark.parametrize("servers", [2, pytest.param("colocated", marks=pytest.mark.extended)])
@pytest.mark.sizes(4)
def test_it_learns_with_shards(ranks, name, servers):
    options = {**SERVED[name], "compression": DENSITY, "servers": servers}
    problem.learns(ranks, name, options, epochs=4, below=0.9, compute=Exponential(0.1))


@pytest.mark.parametrize(("name", "compress_answers"), [("hardsync", True), ("softsync", False)])
@pytest.mark.sizes(8)
def test_it_learns_in_a_tree(ranks, name, compress_answers):
    options = {**SERVED[name], "compression": TOPK, "fan_in": 2, "compress_answers": compress_answers}
    problem.learns(ranks, name, options, epochs=6, below=0.9, compute=Exponential(0.1))


@EACH
@pytest.mark.parametrize(("size", "servers"), [(4, 2), (3, "colocated")])
def test_what_is_sent_as_it_is_changes_nothing(name, size, servers):
    """Neither do messages that would be longer than the tensors; elastic averaging adds what the centre lacks."""
    dense, coded = (
        _train(name, {"servers": servers, **options}, size, samples=50) for options in ({}, {"compression": ALL})
    )
    for a, b in zip(dense, coded, strict=True):
        torch.testing.assert_close(a.consensus[0], b.consensus[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(a.params[0], b.params[0], rtol=0, atol=1e-12)
        assert a.staleness == b.staleness


@pytest.mark.parametrize("name", GRADIENTS)
def test_workers_have_almost_what_the_servers_have(name):
    runs = _train(name, {"compression": "fp16"}, 3, epochs=3)
    (expected,) = runs[0].consensus
    assert torch.equal(runs[0].params[0], expected)
    ends = [(run.params[0] - expected).abs().max().item() for run in runs[1:]]
    dense = [(run.params[0] - run.consensus[0]).abs().max().item() for run in _train(name, {}, 3, epochs=3)[1:]]
    assert all(0 < end < found + 1e-3 for end, found in zip(ends, dense, strict=True))


@EACH
@pytest.mark.parametrize("compression", [DENSITY, TOPK, "fp16"], ids=str)
def test_it_sends_less(name, compression):
    """Of a model of 7 kB, in one-sided calls of a few words beside the messages."""

    def sent(options):
        def body(comm):
            module = torch.nn.Linear(30, 60, bias=False)
            local, cls, channel = torch.optim.SGD(module.parameters(), lr=0.01), strategies.load(name), comm.split(0)
            strategy = cls(cls.Config(**SERVED[name], **options), channel, FlatModel(module))
            before = channel.trace.traffic.bytes_sent
            if strategy.is_worker:
                for _ in range(12):
                    module.weight.grad = torch.randn(60, 30)
                    strategy.step(local.step)
                strategy.pause()
            else:
                strategy.serve(local.step)
            spent = channel.trace.traffic.bytes_sent - before
            strategy.close()
            channel.close()
            return spent

        return sum(run_virtual(body, 3))

    whole, both, letters = (
        sent(options)
        for options in ({}, {"compression": compression}, {"compression": compression, "compress_answers": False})
    )
    assert both < letters < whole
    assert both < (0.55 if compression == "fp16" else 0.2) * whole


# --- gradients that don't count ---------------------------------------------------------------------------------------
@EACH
@pytest.mark.sizes(3)
def test_a_nan_stays_out_of_what_is_left_to_be_sent(ranks, name):
    options = {**SERVED[name], "compression": TOPK, "on_nonfinite": "skip"}
    poison = {(1, 3), (0, 6), (1, 6)}
    runs = ranks(lambda comm: problem.train(comm, name, options, optimizer="sgd", poison=poison))
    assert all(torch.isfinite(run.params[0]).all() and torch.isfinite(run.consensus[0]).all() for run in runs)
    assert sum(bool(record.event) for run in runs for record in run.records) == 2 * len(poison)


@pytest.mark.parametrize("name", GRADIENTS)
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


@pytest.mark.parametrize("name", ["downpour", "easgd", "eamsgd"])
def test_workers_that_step_alone_all_count(name):
    options = {"compression": {"name": "topk", "warmup_steps": 2, "warmup_ranks": 1}}
    with pytest.raises(ConfigError, match=f"strategy.compression.warmup_ranks must be none with {name}, whose"):
        _train(name, options, 2)


def test_compressors_that_lose_too_much_send_gradients_only():
    compression = {"name": "qsgd", "levels": 1, "error_feedback": False}
    _train("hardsync", {"compression": compression, "compress_answers": False}, 2, epochs=1)
    with pytest.raises(ConfigError, match="strategy.compression must lose less than there is where differences of par"):
        _train("hardsync", {"compression": compression}, 2, epochs=1)


# --- checkpoints ------------------------------------------------------------------------------------------------------
def _resumes(ranks, folder, name, *options):
    """Whether a job resumed from its 7th step ends on the same bits."""
    of_strategy = [f"{key}={value}" for key, value in SERVED[name].items() if key != "splits"]
    settings = [f"strategy={name}", *(f"strategy.{option}" for option in (*of_strategy, *options))]
    settings += ["strategy.compression.name=topk", "strategy.compression.ratio=0.1", "epochs=2", "batch_size=16"]
    settings += ["checkpoint.every_steps=7", "checkpoint.keep=100"]

    def body(comm):
        def run(to, path=None):
            trainer = tiny.trainer(comm, to, *settings)
            summary = trainer.run(path)
            trainer.close()
            return summary.sha256

        whole = run(folder / "whole")
        return whole == run(folder / "again", folder / "whole/run/checkpoints/step-00000007")

    return all(ranks(body))


@EACH
@pytest.mark.sizes(3)
def test_a_resumed_job_ends_on_the_same_bits(ranks, shared_tmp_path, name):
    """With one worker, so that nothing depends on who is first."""
    assert _resumes(ranks, shared_tmp_path, name, "servers=2")


@pytest.mark.parametrize("option", ["servers=1", "servers=colocated", "fan_in=2"])
@pytest.mark.sizes(4)
def test_and_with_several_workers_that_are_in_step(ranks, shared_tmp_path, option):
    assert _resumes(ranks, shared_tmp_path, "hardsync", option)


def _after_five_steps(comm, options):
    """The state of hardsync, and how many workers there are."""
    cls, module = strategies.load("hardsync"), problem.model()
    strategy = cls(cls.Config(**options, fan_in=2), comm.split(0), FlatModel(module))
    local = torch.optim.SGD(module.parameters(), lr=0.02)
    if strategy.is_worker:
        for step in range(5):
            local.zero_grad()
            problem.loss(module, range(10 * comm.rank + step, 10 * comm.rank + step + 10)).backward()
            strategy.step(local.step)
        strategy.pause()
    else:
        strategy.serve(local.step)
    found = saved(strategy)
    strategy.close()
    return found, strategy.roles


def _flat(named):
    return torch.cat([piece.tensor.reshape(-1) for piece in named.values()])


def test_in_a_world_of_another_size_no_gradient_that_was_not_sent_is_lost():
    """What is left on the workers and aggregators, as a mean over the workers, stays what it is."""
    options = {"compression": {"name": "topk", "ratio": 0.05}}
    found = run_virtual(lambda comm: _after_five_steps(comm, options), 6)
    states, roles = [state for state, _ in found], found[0][1]
    assert len(roles.workers) >= 2 and roles.aggregators
    left = sum(_flat(state.at("strategy", "requests.whole")) for state in states[1:])
    assert left.abs().max() > 0

    def smaller(comm):
        cls = strategies.load("hardsync")
        strategy = cls(cls.Config(**options, fan_in=2), comm, FlatModel(problem.model()))
        take_up(strategy, states)
        residual = [part.clone() for part in strategy.state()["requests.whole"]]
        strategy.close()
        return residual

    for (residual,) in run_virtual(smaller, 3)[1:]:
        torch.testing.assert_close(residual, left / len(roles.workers), rtol=0, atol=1e-15)
