"""Streaming DiLoCo whose exchanges have a period: means taken up late, alone or with the rank's own new part."""

from __future__ import annotations

import math

import pytest
import torch

from harness.cases import each
from hpcdist import strategies
from hpcdist.comm.virtual import Constant, Network, run_virtual
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from strategies import problem, replicas
from strategies.streaming import NAME, deep, fragments_of, make, train

pytestmark = pytest.mark.computes

STEPS = 17


def by_hand(size, optimizer, steps, *, take_up, period, fragment_layers=None, outer_lr=0.4, outer_momentum=0.9):
    """The parameters of all replicas and their x after each step, both as [step, rank, parameter]."""
    modules = [deep() for _ in range(size)]
    flats = [FlatModel(module).params[0] for module in modules]
    optimizers = [problem.OPTIMIZERS[optimizer](module.parameters()) for module in modules]
    fragments = fragments_of({"fragment_layers": fragment_layers})
    xs, velocities = ([start.clone() for start in flats], [torch.zeros_like(start) for start in flats])
    before = [[torch.zeros(len(places), dtype=torch.float64)] * size for places in fragments]
    due = [(number + 1) * period // len(fragments) for number in range(len(fragments))]
    values = []
    for step in range(1, steps + 1):
        for rank, (module, local) in enumerate(zip(modules, optimizers, strict=True)):
            local.zero_grad()
            replicas.backward(module, rank, size, step - 1)
            local.step()
        for number, places in enumerate(fragments):
            if (step - due[number]) % period:
                continue
            now = [x[places] - own[places] for x, own in zip(xs, flats, strict=True)]
            for rank, (x, velocity) in enumerate(zip(xs, velocities, strict=True)):
                gradient = sum(before[number]) / size
                if take_up == "eager":
                    gradient = gradient + (now[rank] - before[number][rank]) / size
                velocity[places] = outer_momentum * velocity[places] + gradient
                x[places] -= outer_lr * (gradient + outer_momentum * velocity[places])
                flats[rank][places] = x[places]
            before[number] = now
        values.append((torch.stack(flats), torch.stack(xs)))
    return tuple(torch.stack(of) for of in zip(*values, strict=True))


@each("options", [
    {"period": 4}, {"period": 5, "fragment_layers": 2}, {"period": 3, "fragment_layers": 3, "outer_momentum": 0.0},
    {"period": 1},
])  # fmt: skip
@each("take_up", ["delayed", "eager"])
@pytest.mark.sizes(2, 3)
def test_it_does_what_is_done_by_hand(ranks, options, take_up):
    options = {"take_up": take_up, "fragment_layers": None, **options}
    found = ranks(lambda comm: train(comm, options, "adam", STEPS))
    expected, common = by_hand(len(found), "adam", STEPS, **options)
    for rank, values in enumerate(found):
        torch.testing.assert_close(torch.stack([own for own, _, _ in values]), expected[:, rank], rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.stack([x for _, x, _ in values]), common[:, rank], rtol=0, atol=1e-12)
    if take_up == "delayed":
        assert all(torch.equal(x, found[0][step][1]) for values in found for step, (_, x, _) in enumerate(values))


def test_eager_on_one_rank_is_diloco():
    """The rule, as the library steps alone there; the test above ties it to the library."""
    outer = {"period": 4, "outer_lr": 0.7, "outer_momentum": 0.9}
    eager, _ = by_hand(1, "adam", STEPS, take_up="eager", **outer)
    module = deep()
    flat, local = FlatModel(module).params[0], problem.OPTIMIZERS["adam"](module.parameters())
    x = flat.clone()
    outer_step = torch.optim.SGD([x], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(STEPS):
        local.zero_grad()
        replicas.backward(module, 0, 1, step)
        local.step()
        if (step + 1) % 4 == 0:
            x.grad = x - flat
            outer_step.step()
            flat.copy_(x)
        torch.testing.assert_close(eager[step, 0], flat, rtol=0, atol=1e-12)


@pytest.mark.sizes(2, 4)
def test_eager_ranks_of_the_same_data_are_equal_to_the_bit(ranks):
    def body(comm):
        strategy, local = make(comm, {"period": 3, "fragment_layers": 2, "take_up": "eager"}, "adam")
        found = []
        for step in range(STEPS):
            local.zero_grad()
            replicas.backward(strategy.model.module, 0, 1, step)
            strategy.step(local.step)
            found.append(strategy.model.params[0].clone())
        replicas.end(strategy)
        return found

    found = ranks(body)
    for values in found:
        assert all(map(torch.equal, values, found[0]))


@pytest.mark.sizes(2, 3)
def test_eager_ranks_differ_by_their_last_part_only(ranks):
    """The sum over periods telescopes: taking out each rank's own part of the last period makes all x equal."""
    period, rate = 4, 0.5
    options = {
        "period": period, "fragment_layers": None, "take_up": "eager", "outer_lr": rate, "outer_momentum": 0.0
    }  # fmt: skip

    def body(comm):
        strategy, local = make(comm, options, "momentum")
        found = []
        for step in range(5 * period):
            replicas.go(strategy, local, range(step, step + 1))
            if (step + 1) % period == 0:
                own = strategy._gone[0] / strategy.comm.size
                found.append((strategy.common[0].clone(), strategy.common[0] + rate * own))
        replicas.end(strategy)
        return found

    found = ranks(body)
    for turn in range(5):
        assert not torch.equal(found[1][turn][0], found[0][turn][0])
        torch.testing.assert_close(found[1][turn][1], found[0][turn][1], rtol=0, atol=1e-12)


@each("take_up", ["delayed", "eager"])
@pytest.mark.sizes(1, 3)
def test_a_run_taken_up_in_the_middle_of_a_period_ends_on_the_same_bits(ranks, take_up):
    options = {"period": 5, "fragment_layers": 2, "take_up": take_up, "compression": "e3m0"}
    assert replicas.all_same_when_taken_up(ranks, NAME, options, "adam", (1, 3, 5, 8), STEPS)


@pytest.mark.sizes(3)
def test_a_resumed_job_ends_where_the_uninterrupted_one_ends(ranks, shared_tmp_path):
    options = ("period=5", "take_up=eager", "fragment_layers=1")
    assert all(ranks(lambda comm: replicas.same_when_resumed(comm, shared_tmp_path, NAME, options, 6)))


def test_a_delay_of_its_own_has_no_meaning():
    for take_up in ("delayed", "eager"):
        with pytest.raises(ConfigError, match=f"strategy.delay must not be given where .* is {take_up}, .* got 2"):
            strategies.load(NAME).Config(take_up=take_up, delay=2)


@each("options", [
    {"delay": 1, "fragment_layers": 2}, {"delay": 2, "fragment_layers": 2}, {"take_up": "eager"},
    {"take_up": "delayed", "fragment_layers": 1},
])  # fmt: skip
def test_an_exchange_that_lasts_no_longer_than_it_may_takes_no_time(options):
    """A computation of 0.1 s a step, on a network on which an exchange takes the given seconds at each latency."""

    def seconds(latency_s):
        def body(comm):
            strategy, local = make(comm, {"period": 6, "fragment_layers": None, **options})
            start_s = comm.now()
            replicas.go(strategy, local, range(12))
            taken_s = comm.now() - start_s
            replicas.end(strategy)
            return taken_s

        return max(run_virtual(body, 3, network=Network(latency_s, math.inf), compute=Constant(0.1)))

    free_s = seconds(0.0)
    steps = 6 if "take_up" in options else options["delay"]
    exchanges = 5 if options.get("fragment_layers") == 1 else 1  # of fragments, one after the other, in these steps
    lasts = steps * 0.1 / (8 * exchanges)  # a ring of three has four messages, and four of flags
    assert seconds(0.9 * lasts) == pytest.approx(free_s)
    assert seconds(2 * lasts) > free_s + 0.05
