"""SlowMo: as DiLoCo; when the rate changes; over gossip; what becomes of the optimiser's state."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist.config.settings import Named
from strategies import problem, replicas

pytestmark = pytest.mark.computes

NAME = "slowmo"
STEPS = 13
GOSSIPS = [
    Named(name="dpsgd"), Named(name="dpsgd", overlap=False), Named(name="sgp"),
    Named(name="sgp", topology={"name": "exponential"}), Named(name="sparta", share=0.2, delay=1),
]  # fmt: skip


@pytest.mark.sizes(2)
def test_gradients_whose_sum_is_beyond_float16s_range_move_as_in_float32(ranks):
    """And 1/rate, 10⁵, is beyond it, too."""

    def body(comm):
        found = []
        for dtype in (torch.float16, torch.float32):
            module = torch.nn.Linear(2, 1, bias=False, dtype=dtype)
            module.weight.data.fill_(1.0)
            local = torch.optim.SGD(module.parameters(), lr=1e-5)
            strategy = problem.make(comm, NAME, module, local, period=2)
            for _ in range(4):
                module.weight.grad = torch.full_like(module.weight, 4e4)
                strategy.step(local.step)
            found.append(module.weight[0, 0].item())
            strategy.close()
        return found

    for half, single in ranks(body):
        assert half == pytest.approx(single, abs=2e-3) and single == pytest.approx(-1, abs=1e-6)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@each("optimizer", ["momentum", "adam"])
@each("options", [{"slow_lr": 0.8, "slow_momentum": 0.6}, {"slow_lr": 1.0, "slow_momentum": 0.0}])
@pytest.mark.sizes(1, 3)
def test_at_one_rate_it_is_diloco_with_heavy_ball(ranks, options, optimizer):
    """And so, if nothing is compressed, blockwise model-update filtering."""
    outer = {"outer_lr": options["slow_lr"], "outer_momentum": options["slow_momentum"], "nesterov": False}

    def body(comm):
        own, _ = replicas.train(comm, NAME, {"period": 3, **options}, optimizer, STEPS)
        diloco, _ = replicas.train(comm, "diloco", {"period": 3, **outer}, optimizer, STEPS)
        close(own, diloco)

    ranks(body)


@pytest.mark.sizes(2)
def test_the_slow_step_falls_with_the_rate_at_once(ranks):
    """A period in which nobody moves, at a tenth of the rate: the slow step is a tenth of one at the old rate."""

    def moved(comm, factor):
        strategy, local = replicas.make(comm, NAME, {"period": 2, "slow_momentum": 0.5}, "sgd")
        replicas.go(strategy, local, range(4))
        before = strategy.common[0].clone()
        local.param_groups[0]["lr"] *= factor
        for _ in range(2):
            replicas.stay(strategy, local)
        found = strategy.common[0] - before
        replicas.end(strategy)
        return found

    for whole, tenth in ranks(lambda comm: (moved(comm, 1.0), moved(comm, 0.1))):
        assert whole.abs().max() > 1e-4
        torch.testing.assert_close(tenth, 0.1 * whole, rtol=1e-9, atol=1e-15)


@pytest.mark.sizes(2)
def test_a_rate_of_0_at_the_end_of_a_period_loses_no_step(ranks):
    def body(comm, name, options):
        strategy, local = replicas.make(comm, name, {"period": 2, **options}, "sgd")
        for step in range(6):
            local.param_groups[0]["lr"] = 0.05 * (step % 2 == 0)
            replicas.go(strategy, local, range(step, step + 1))
        found = strategy.model.params[0].clone()
        replicas.end(strategy)
        return found

    for own, averaged in ranks(lambda c: (body(c, NAME, {"slow_momentum": 0.0}), body(c, "local_sgd", {}))):
        close(own, averaged)


# --- over gossip ------------------------------------------------------------------------------------------------------
@each("base", GOSSIPS)
@pytest.mark.sizes(4)
def test_over_gossip_replicas_are_equal_after_a_slow_step_and_at_no_other_time(ranks, base):
    found = ranks(lambda comm: replicas.train(comm, NAME, {"period": 4, "base": base}, "momentum", STEPS)[0])
    for step in range(STEPS):
        same = all(torch.equal(values[step], found[0][step]) for values in found)
        assert same == ((step + 1) % 4 == 0), step


@each("name", ["dpsgd", "sgp"])
@pytest.mark.sizes(4)
def test_without_slow_momentum_the_mean_follows_that_of_the_base(ranks, name):
    """On constant gradients of each rank's own, whose mean no average changes."""

    def body(comm, name, options):
        strategy, local = replicas.make(comm, name, options, "sgd")
        found = []
        for _ in range(STEPS):
            for place, slot in enumerate(strategy.model.slots):
                slot.tensor.grad = torch.full_like(slot.tensor, (comm.rank + 1.0) * (place + 1.0))
            strategy.step(local.step)
            found.append(strategy.model.params[0].clone())
        strategy.pause()
        replicas.end(strategy)
        return torch.stack(found)

    def both(comm):
        options = {"period": 4, "base": Named(name=name), "slow_momentum": 0.0}
        return body(comm, NAME, options), body(comm, name, {})

    found = ranks(both)
    close(sum(own for own, _ in found), sum(base for _, base in found))


@pytest.mark.sizes(2)
def test_the_local_state_is_kept_forgotten_or_averaged(ranks):
    def body(comm, inner_state):
        strategy, local = replicas.make(comm, NAME, {"period": 3, "inner_state": inner_state}, "adam")
        replicas.go(strategy, local, range(3))
        found = [state["exp_avg"].clone() for state in local.state.values()]
        replicas.end(strategy)
        return found

    first, second = ranks(lambda comm: [body(comm, kind) for kind in ("keep", "reset", "average")])
    assert not any(map(torch.equal, first[0], second[0])) and first[1] == second[1] == []
    for ours, theirs, own, other in zip(first[2], second[2], first[0], second[0], strict=True):
        assert torch.equal(ours, theirs)
        close(ours, (own + other) / 2)
