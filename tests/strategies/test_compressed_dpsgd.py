"""dpsgd with compressed differences: neighbours follow public copies, and all that a message lacks comes later."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from harness.worlds import HeldRank
from hpcdist import compress
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import ConfigError
from hpcdist.strategies import load
from strategies import mixed, problem

pytestmark = pytest.mark.computes

OPTIONS = {"threshold": {"density": 0.2}, "topk": {"ratio": 0.2}, "dgc": {"ratio": 0.2, "momentum": 0.0}}
every = each("compressor", [name for name in compress.available() if name != "none" and compress.load(name).feeds_back])


def _options(compressor: str, **more) -> dict:
    rate = {} if compress.load(compressor).faithful else {"consensus_rate": 0.2}
    return {"compression": {"name": compressor, **OPTIONS.get(compressor, {}), **more}, **rate}


def _mix(comm, options: dict, steps: int):
    """Only averages; each rank's parameters at the start and at the end."""
    strategy = mixed.linear(comm, "dpsgd", **options)
    strategy.model.params[0].copy_(mixed.drawn(comm.rank))
    strategy.load_state({"steps": 0})  # neighbours are told
    start = strategy.model.params[0].clone()
    for _ in range(steps):
        mixed.step_without_samples(strategy)
    end = strategy.model.params[0].clone()
    strategy.close()
    return start, end


@every
@pytest.mark.sizes(2, 7)
def test_the_mean_stays_and_the_ranks_come_together(ranks, compressor):
    found = ranks(lambda comm: _mix(comm, _options(compressor), 60))
    start, end = (torch.stack(rows) for rows in zip(*found, strict=True))
    torch.testing.assert_close(end.mean(dim=0), start.mean(dim=0), rtol=0, atol=1e-12)
    assert (end - end.mean(dim=0)).norm() < 0.3 * (start - start.mean(dim=0)).norm()


@pytest.mark.sizes(2, 4)
def test_messages_that_say_all_make_it_the_uncompressed_strategy(ranks):
    def body(comm):
        whole = {"compression": {"name": "fp16", "warmup_steps": 1000}}
        return [problem.train(comm, "dpsgd", options).params[0] for options in (whole, {})]

    for compressed, plain in ranks(body):
        torch.testing.assert_close(compressed, plain, rtol=0, atol=1e-12)


@every
@pytest.mark.sizes(4)
def test_it_learns(ranks, compressor):
    problem.learns(ranks, "dpsgd", _options(compressor))


@pytest.mark.sizes(3, 4)
def test_bytes_are_those_of_the_messages(ranks):
    def body(comm):
        run = problem.train(comm, "dpsgd", {"compression": "bf16"}, epochs=1, tells=False)
        return [record.bytes_sent for record in run.records]

    n = sum(p.numel() for p in problem.model().parameters())
    for sent in ranks(body):
        assert set(sent[1:]) == {2 * 2 * n}  # two neighbours, two bytes each
        assert sent[0] == 2 * 2 * 2 * n  # the first exchange, and the one under way


@each("overlap", [True, False])
@each("compressor", ["topk", "qsgd", "powersgd"])
@pytest.mark.sizes(3)
def test_a_saved_state_goes_on_to_the_same_bits(ranks, compressor, overlap):
    def body(comm):
        options = _options(compressor) | {"overlap": overlap}

        def make():
            module = problem.model()
            cls = load("dpsgd")
            local = torch.optim.SGD(module.parameters(), lr=0.05)
            return cls(cls.Config(**options), comm.split(0), mixed.FlatModel(module)), local

        def go(strategy, local, steps):
            for step in steps:
                local.zero_grad()
                problem.loss(strategy.model.module, range(step, step + 8 + comm.rank)).backward()
                strategy.step(local.step)
            return strategy.model.params[0].clone()

        strategy, local = make()
        go(strategy, local, range(5))
        params, state = HeldRank([[flat.clone() for flat in strategy.model.params], strategy.state()]).at()
        expected = go(strategy, local, range(5, 9))
        strategy.close()
        again, local = make()
        again.model.load_params(params)
        again.load_state(state)
        found = go(again, local, range(5, 9))
        again.close()
        return torch.equal(found, expected)

    assert all(ranks(body))


def test_a_topology_that_changes_is_refused():
    def body(comm):
        with pytest.raises(ConfigError, match="topology must have the same neighbours at every step with .*compr"):
            mixed.linear(comm, "dpsgd", compression="fp16", topology="hierarchical")
        return True

    assert all(run_virtual(body, 4, network=mixed.NODES))


@each("options", [{"error_feedback": False}, {"warmup_steps": 3, "warmup_ranks": 1}])
def test_copies_must_follow_every_rank(options):
    with pytest.raises(ConfigError, match="compression of dpsgd must be with error_feedback and without warmup_ranks"):
        load("dpsgd").Config(compression={"name": "topk", **options})
