"""SlowMo: as local SGD, DiLoCo and BMUF; when the rate changes; over gossip; taken up again."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist import strategies
from hpcdist.config import Named
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from strategies import replicas

pytestmark = pytest.mark.computes

NAME = "slowmo"
STEPS = 13
GOSSIPS = [
    Named(name="dpsgd"), Named(name="dpsgd", overlap=False), Named(name="sgp"),
    Named(name="sgp", topology={"name": "exponential"}),
]  # fmt: skip


def test_the_defaults_are_those_of_the_published_code():
    config = strategies.load(NAME).Config()
    assert (config.period, config.slow_lr, config.slow_momentum, config.base.name) == (48, 1.0, 0.5, "local")


@pytest.mark.sizes(2)
def test_gradients_whose_sum_is_beyond_float16s_range_move_as_in_float32(ranks):
    """And 1/rate, 10⁵, is beyond it, too."""

    def body(comm):
        found = []
        for dtype in (torch.float16, torch.float32):
            module = torch.nn.Linear(2, 1, bias=False, dtype=dtype)
            module.weight.data.fill_(1.0)
            local, cls = torch.optim.SGD(module.parameters(), lr=1e-5), strategies.load(NAME)
            strategy = cls(cls.Config(period=2), comm.split(0), FlatModel(module), optimizer=local)
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


@each("optimizer", ["sgd", "adam"])
@pytest.mark.sizes(1, 2, 4)
def test_without_slow_momentum_it_is_local_sgd(ranks, optimizer):
    def body(comm):
        own, _ = replicas.train(comm, NAME, {"period": 3, "slow_momentum": 0.0}, optimizer, STEPS)
        local, _ = replicas.train(comm, "local_sgd", {"period": 3}, optimizer, STEPS)
        close(own, local)

    ranks(body)


@each("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.sizes(2, 3)
def test_at_one_rate_it_is_diloco_with_heavy_ball(ranks, optimizer):
    def body(comm):
        options = {"period": 3, "slow_lr": 0.8, "slow_momentum": 0.6}
        own, _ = replicas.train(comm, NAME, options, optimizer, STEPS)
        outer = {"outer_lr": 0.8, "outer_momentum": 0.6, "nesterov": False}
        diloco, _ = replicas.train(comm, "diloco", {"period": 3, **outer}, optimizer, STEPS)
        close(own, diloco)

    ranks(body)


def bmuf(size, steps, period, rate, momentum, nesterov):
    """Blockwise model-update filtering by its formulas: what is broadcast after each block, [block, parameter]."""
    hand = replicas.ByHand(size, "adam")
    x = hand.params[0].clone()
    given, way, found = x.clone(), torch.zeros_like(x), []
    for step in range(1, steps + 1):
        hand.steps()
        if step % period == 0:
            way = momentum * way + rate * (sum(hand.params) / size - given)
            x = x + way
            given = x + momentum * way if nesterov else x
            for own in hand.params:
                own.copy_(given)
            found.append(given.clone())
    return torch.stack(found)


@pytest.mark.sizes(3)
def test_blockwise_model_update_filtering_is_slowmo_and_in_its_nesterov_form_diloco(ranks):
    def body(comm):
        options = {"period": 3, "slow_lr": 0.9, "slow_momentum": 0.6}
        own, _ = replicas.train(comm, NAME, options, "adam", STEPS)
        outer = {"outer_lr": 0.9, "outer_momentum": 0.6}
        diloco, _ = replicas.train(comm, "diloco", {"period": 3, **outer}, "adam", STEPS)
        return own[2::3], diloco[2::3]

    for own, diloco in ranks(body):
        close(own, bmuf(3, STEPS, 3, 0.9, 0.6, False))
        close(diloco, bmuf(3, STEPS, 3, 0.9, 0.6, True))


@pytest.mark.sizes(2)
def test_of_ranks_that_see_the_same_it_is_lookahead_with_momentum(ranks, monkeypatch):
    backward = replicas.backward
    monkeypatch.setattr(replicas, "backward", lambda module, rank, size, step: backward(module, 0, 1, step))
    for own, _ in ranks(lambda comm: replicas.train(comm, NAME, {"period": 3, "slow_lr": 0.5}, "adam", STEPS)):
        close(own[2::3], bmuf(1, STEPS, 3, 0.5, 0.5, False))


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
            for place, parameter in enumerate(strategy.model.parameters()):
                parameter.grad = torch.full_like(parameter, (comm.rank + 1.0) * (place + 1.0))
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


@each("options", [
    {}, {"overlap": True}, {"base": Named(name="dpsgd")}, {"inner_state": "reset"}, {"inner_state": "average"},
])  # fmt: skip
@pytest.mark.sizes(1, 3)
def test_a_run_taken_up_ends_on_the_same_bits(ranks, options):
    assert replicas.all_same_when_taken_up(ranks, NAME, {"period": 4, **options}, "adam", (3, 4), STEPS)


@pytest.mark.sizes(3)
def test_a_resumed_job_ends_where_the_uninterrupted_one_ends(ranks, shared_tmp_path):
    for number, options in enumerate((("period=4",), ("period=4", "base=sgp"))):
        folder = shared_tmp_path / str(number)
        assert all(ranks(lambda comm, f=folder, o=options: replicas.same_when_resumed(comm, f, NAME, o, 6)))


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": "adpsgd"}, "strategy.base must be one of local, dpsgd, sgp, sparta; got adpsgd. Take one of them."),
        ({"base": {"name": "local", "topology": "ring"}}, "strategy.base must have no options with local; got topol"),
        ({"base": "dpsgd", "overlap": True}, "strategy.overlap must be false, and strategy.base without compression"),
        ({"base": {"name": "dpsgd", "compression": "topk"}}, "strategy.base without compression, with dpsgd"),
        ({"base": {"name": "dpsgd", "topolgy": "ring"}}, "strategy.base setting must be one of .* got 'topolgy'"),
        (
            {"period": 3, "base": {"name": "sparta", "delay": 3}},
            "strategy.base.delay must be less than strategy.period, 3",
        ),
        ({"slow_lr": float("nan")}, "slow_lr must be a finite number; got nan"),
    ],
)
def test_what_has_no_meaning_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        strategies.load(NAME).Config(**options)


def test_state_of_an_unknown_optimiser_cannot_be_forgotten():
    from hpcdist.comm.virtual import run_virtual

    def body(comm):
        strategy, local = replicas.make(comm, NAME, {"period": 1, "inner_state": "reset"}, "sgd")
        strategy.optimizer = None
        replicas.go(strategy, local, range(1))

    with pytest.raises(ConfigError, match="strategy.optimizer must be the local optimiser where strategy.inner_st"):
        run_virtual(body, 2)
