"""How much less a stale gradient counts: the rules' factors, and what a server makes of them."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from harness.cases import each
from harness.worlds import saved, take_up
from hpcdist import strategies
from hpcdist.comm.virtual import run_virtual
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.parameter_server import AsynchronousPolicy, ParameterServer
from hpcdist.strategies.server.channel import GRADIENT, ServerRequest
from hpcdist.strategies.server.stale import Rule

STALENESS = (0, 1, 2, 5)
RULES = get_args(Rule)
RATE, SIZE = 0.1, 7


FACTORS = {
    "none": (1, 1, 1, 1),
    "average": (1 / 4, 1 / 4, 1 / 4, 1 / 4),
    "measured": (1 / 3, 1 / 3, 1 / 3, 1 / 3),
    "per-gradient": (1, 1, 1 / 2, 1 / 5),
    "plus-one": (1, 1 / 2, 1 / 3, 1 / 6),
    "exponential": (1, math.exp(-0.3), math.exp(-0.6), math.exp(-1.5)),
}


def factor(rule, staleness, expected=1.0, measured=1.0, decay=0.1):
    policy = AsynchronousPolicy(ParameterServer.Config(modulation=rule, decay=decay), expected)
    policy.measured = [measured]
    return policy.factor(staleness)


@each("rule", RULES)
def test_factors_of_staleness_0_1_2_5(rule):
    known = {"expected": 4.0, "measured": 3.0, "decay": 0.3}
    assert tuple(factor(rule, s, **known) for s in STALENESS) == pytest.approx(FACTORS[rule], rel=1e-15)


def _scripted(name, options, requests, workers, optimizer):
    """A server that is given requests of (worker, clock, gradient) and nothing else; its parameters after each one."""

    def body(comm):
        module = torch.nn.Linear(SIZE, 1, bias=False, dtype=torch.float64)
        torch.nn.init.ones_(module.weight)
        cls = strategies.load(name)
        strategy = cls(cls.Config(**options), comm.split(0), FlatModel(module))
        found, records = [strategy.model.params[0].clone()], []
        strategy.records.write = records.append
        if comm.rank == 0:
            local = optimizer(module.parameters())
            strategy.server.update = local.step  # as `serve` hands it over; the period is the script
            for worker, clock, gradient in requests:
                used = torch.ones(1, dtype=torch.bool)
                strategy.server.receive(ServerRequest(1 + worker, GRADIENT, 1.0, (clock,), [gradient.clone()], used))
                found.append(strategy.model.params[0].clone())
            strategy.server.end()
        comm.barrier()
        strategy.close()
        return found, [s for record in records for s in record.staleness]

    return run_virtual(body, workers + 1)[0]


def _gradients(count):
    return list(torch.randn(count, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


@each("rule", RULES)
def test_an_update_is_the_mean_of_modulated_gradients(rule):
    """(α/c) Σ f(τᵢ) gᵢ for 1-softsync of 4 workers, after 5 updates of zero gradients, at τ = 0, 1, 2, 5."""
    gradients, zero = _gradients(4), torch.zeros(SIZE, dtype=torch.float64)
    requests = [(worker, update, zero) for update in range(5) for worker in range(4)]
    requests += [(worker, 5 - s, g) for worker, (s, g) in enumerate(zip(STALENESS, gradients, strict=True))]
    options = {"splits": 1, "modulation": rule, "decay": 0.3}
    found, staleness = _scripted("softsync", options, requests, 4, lambda p: torch.optim.SGD(p, lr=RATE))
    factors = [factor(rule, s, expected=1.0, decay=0.3) for s in STALENESS]
    expected = 1 - RATE / 4 * sum(f * g for f, g in zip(factors, gradients, strict=True))
    assert staleness == [0] * 20 + list(STALENESS)
    assert torch.equal(found[-2], torch.ones(SIZE, dtype=torch.float64)), "an update before its last gradient"
    torch.testing.assert_close(found[-1], expected, rtol=1e-14, atol=0)


@each("rule", RULES)
@each("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_every_optimisers_step_is_smaller_by_the_factor(rule, make):
    """Adam undoes a constant factor of its gradients; the step must be smaller all the same."""
    requests = [(0, 0, gradient) for gradient in _gradients(4)]  # one worker's, at staleness 0, 1, 2, 3
    runs = {}
    for modulation in ("none", rule):
        options = {"modulation": modulation, "decay": 0.3}
        found, staleness = _scripted("parameter_server", options, requests, 3, lambda p: make(p, lr=RATE))
        runs[modulation] = found
        assert staleness == [0, 1, 2, 3]
    first = [b - a for a, b in zip(runs["none"], runs["none"][1:])]
    second = [b - a for a, b in zip(runs[rule], runs[rule][1:])]
    measured = (0, 0, 0.5, 1)  # of the gradients before
    expected = [factor(rule, s, expected=3.0, measured=m, decay=0.3) for s, m in enumerate(measured)]
    if make is torch.optim.AdamW:  # its decay looks at the parameters, which differ from the second step on
        first, second, expected = first[:1], second[:1], expected[:1]
    for plain, modulated, less in zip(first, second, expected, strict=True):
        torch.testing.assert_close(modulated, less * plain, rtol=1e-9, atol=1e-15)


# --- the staleness that is found --------------------------------------------------------------------------------------
def test_the_mean_staleness_is_that_of_the_last_gradients_applied():
    policy = AsynchronousPolicy(ParameterServer.Config(modulation="measured", modulation_window=3), 1)
    factors = [policy.factor(0)]
    for update in ([4], [0, 2], [5], [1, 1, 1, 1]):
        policy.updated(update)
        factors.append(policy.factor(0))
    assert factors == [1, 1 / 4, 1 / 2, 1 / (7 / 3), 1] and policy.measured == [1, 1, 1]


def test_measured_divides_by_the_mean_staleness_of_the_gradients_before():
    """A worker's four gradients of updates ago 0, 1, 2, 3, and then of 4, 5, 6: the window is of four."""
    gradients = _gradients(7)
    requests = [(0, 0, gradient) for gradient in gradients]
    options = {"modulation": "measured", "modulation_window": 4}
    found, staleness = _scripted("parameter_server", options, requests, 3, lambda p: torch.optim.SGD(p, lr=RATE))
    assert staleness == list(range(7))
    divisors = [1, 1, 1, 1, 1.5, 2.5, 3.5]  # means 0, 0, 0.5, 1 are not above 1
    for before, after, gradient, divisor in zip(found, found[1:], gradients, divisors, strict=False):
        torch.testing.assert_close(after, before - RATE / divisor * gradient, rtol=1e-14, atol=1e-15)


def test_all_gradients_of_an_update_are_divided_alike():
    """Two at a time: those of the third update, of staleness 2 and 0, by the mean of 0, 0, 1, 5 in the two before."""
    gradients, zero = _gradients(2), torch.zeros(SIZE, dtype=torch.float64)
    updates = [(0, 0), (0, -4), (0, 2)]
    requests = [(worker, clock, zero) for clocks in updates[:2] for worker, clock in enumerate(clocks)]
    requests += [(worker, clock, g) for worker, (clock, g) in enumerate(zip(updates[2], gradients, strict=True))]
    options = {"splits": 1, "modulation": "measured"}
    found, staleness = _scripted("softsync", options, requests, 2, lambda p: torch.optim.SGD(p, lr=RATE))
    assert staleness == [0, 0, 1, 5, 2, 0]
    torch.testing.assert_close(found[-1], 1 - RATE / 1.5 * sum(gradients) / 2, rtol=1e-14, atol=0)


def test_each_server_divides_by_what_it_has_found_itself_and_saves_it():
    """Two servers, of which the second's gradients are staler."""
    held = {}

    def body(comm):
        module = torch.nn.Linear(SIZE - 1, 2, bias=False, dtype=torch.float64)
        cls = strategies.load("parameter_server")
        strategy = cls(cls.Config(servers=2, modulation="measured"), comm.split(0), FlatModel(module))
        policy = strategy.server.policy if comm.rank < 2 else AsynchronousPolicy(strategy.config, 1)
        policy.updated([2 + 6 * comm.rank])
        found = policy.factor(0)
        state = strategy.state.save()
        policy.updated([100])
        strategy.state.load(state)
        again = policy.factor(0)
        held[comm.rank] = saved(strategy)
        comm.barrier()
        take_up(strategy, [held[0], held[1], held[2], held[2]])  # of a world of another size
        anew = policy.factor(0)
        strategy.close()
        return found, again, anew

    assert run_virtual(body, 3)[:2] == [(1 / 2, 1 / 2, 1), (1 / 8, 1 / 8, 1)]
