"""1-bit Adam and 0/1 Adam: the published rules step by step, sums of what is sent and left, equal replicas."""

from __future__ import annotations

import pytest
import torch

from harness import loops
from harness.cases import each
from hpcdist import strategies
from hpcdist.comm.virtual import run_virtual
from hpcdist.model.flat import FlatModel
from strategies import problem, replicas

pytestmark = pytest.mark.computes
STEPS, BETAS, EPS, DECAY = 14, (0.9, 0.95), 1e-3, 0.1
EXACT = {"compression": "none"}


def rate(step):
    return 0.02 / (1 + 0.1 * step)


def go(comm, name, options, steps=STEPS, decay=DECAY, make=problem.model, after=lambda strategy: None):
    """Collective. After each step parameters, m and v as flat tensors; and the gradients of each."""
    module = make()
    local = torch.optim.AdamW(module.parameters(), lr=1.0, betas=BETAS, eps=EPS, weight_decay=decay)
    strategy = problem.make(comm, name, module, local, **options)
    found, gradients = [], []
    for step in range(steps):
        local.param_groups[0]["lr"] = rate(step)
        local.zero_grad()
        replicas.backward(module, comm.rank, comm.size, step)
        gradients.append(torch.cat([p.grad.reshape(-1) for p in module.parameters()]))
        strategy.step(local.step)
        found.append((strategy.model.params[0].clone(), *moments(local, module)))
        after(strategy)
    strategy.close()
    return found, gradients


def moments(local, module):
    states = [local.state[p] for p in module.parameters()]
    return [torch.cat([state[key].reshape(-1) for state in states]) for key in ("exp_avg", "exp_avg_sq")]


class Serial:
    """The rule in one process."""

    def __init__(self, decay=DECAY):
        self.x, self.decay, self.step = FlatModel(problem.model()).params[0].clone(), decay, 0
        self.m, self.v = torch.zeros_like(self.x), torch.zeros_like(self.x)

    def momentum(self, gradient):
        return self.m.mul(BETAS[0]).add(gradient, alpha=1 - BETAS[0])

    def squares(self, gradient):
        self.v = self.v.mul(BETAS[1]).addcmul(gradient, gradient, value=1 - BETAS[1])

    @property
    def scale(self):
        return self.v.sqrt() + EPS

    def move(self):
        self.x = self.x.sub((self.m / self.scale).add(self.x, alpha=self.decay), alpha=rate(self.step))
        self.step += 1


def close(found, serial, step):
    for own, expected in zip(found[step], (serial.x, serial.m, serial.v), strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)


# --- 1-bit Adam -------------------------------------------------------------------------------------------------------
@pytest.mark.sizes(2, 3)
def test_adam_without_bias_correction_has_a_fixed_preconditioner_after_the_warm_up(ranks):
    for warmup_steps in (5, STEPS):
        results = ranks(lambda comm, n=warmup_steps: go(comm, "onebit_adam", {"warmup_steps": n, **EXACT}))
        serial = Serial()
        for step in range(STEPS):
            mean = sum(gradients[step] for _, gradients in results) / len(results)
            serial.m = serial.momentum(mean)
            if step < warmup_steps:
                serial.squares(mean)
            serial.move()
            close(results[0][0], serial, step)


@each("name", ["onebit_adam", "zero_one_adam"])
@pytest.mark.sizes(3)
def test_replicas_are_equal_where_they_must_be(ranks, name):
    options = {"warmup_steps": 5} if name == "onebit_adam" else {"variance_steps": 6, "full_steps": 2, "local_steps": 4}
    results = ranks(lambda comm: go(comm, name, options))
    config = strategies.load(name).Config(**options)
    for step in range(STEPS):
        same = all(
            torch.equal(own, other)
            for found, _ in results
            for own, other in zip(found[step], results[0][0][step], strict=True)
        )
        assert same == config.synchronizes(step + 1), step


@pytest.mark.sizes(3)
def test_momentum_is_sent_or_left(ranks):
    """Σz given = Σ mean received + what is left, at both ends, over the steps after the warm-up."""
    left = []

    def body(comm):
        kept = []

        def look(strategy):
            mean = strategy._mean
            kept.append((mean.residuals[0].clone(), mean.mean_residuals[0].clone(), mean.ranges[0]))

        found, gradients = go(comm, "onebit_adam", {"warmup_steps": 5}, after=look)
        given = [BETAS[0] * found[step - 1][1] + (1 - BETAS[0]) * gradients[step] for step in range(5, STEPS)]
        return sum(given), sum(found[step][1] for step in range(5, STEPS)), kept[-1]

    results = ranks(body)
    received = results[0][1]
    expected = sum(given - kept[0] for given, _, kept in results) / len(results)
    for _, _, (_, owed, (start, stop)) in results:
        expected[start:stop] -= owed
        left.append(owed.abs().max())
    torch.testing.assert_close(received, expected, rtol=0, atol=1e-12)
    assert max(left) > 1e-9


def test_elements_without_a_gradient_stay():
    """One bit has no zero, and v is 0 there."""

    def dead():
        module = problem.model()
        module[0].weight.register_hook(lambda gradient: gradient * torch.tensor([0.0, 1, 1, 1, 1, 1]))
        return module

    for name, options in (("onebit_adam", {"warmup_steps": 5}), ("zero_one_adam", {"variance_steps": 6})):
        found, _ = run_virtual(lambda comm, n=name, o=options: go(comm, n, o, decay=0.0, make=dead), 3)[0]
        start = FlatModel(problem.model()).params[0]
        moved = (found[-1][0] - start)[: 8 * 6].view(8, 6)
        assert not moved[:, 0].any() and moved[:, 1:].all()


# --- one rank ---------------------------------------------------------------------------------------------------------
ALONE = [
    ("onebit_adam", {"warmup_steps": 5, "compression": "topk"}),
    ("zero_one_adam", {"variance_steps": 4, "full_steps": 1, "local_steps": 2}),
]


@each("case", ALONE)
@pytest.mark.sizes(1)
def test_on_one_rank_it_is_the_optimiser_to_the_bit(ranks, case):
    ((found, _),) = ranks(lambda comm: go(comm, *case))
    module = problem.model()
    plain = torch.optim.AdamW(module.parameters(), lr=1.0, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for step in range(STEPS):
        plain.param_groups[0]["lr"] = rate(step)
        plain.zero_grad()
        replicas.backward(module, 0, 1, step)
        plain.step()
        assert all(map(torch.equal, found[step], (loops.vector(module), *moments(plain, module)))), step


# --- 0/1 Adam ---------------------------------------------------------------------------------------------------------
def test_full_steps_are_as_far_apart_as_the_rule_says():
    """By how v changes: at steps 1 to 16, 18, 20, ... 48, 52, ..."""

    def body(comm):
        found, _ = go(comm, "zero_one_adam", {"variance_steps": 60}, steps=56)
        squares = [torch.zeros_like(found[0][2]), *(v for *_, v in found)]
        return [step for step in range(1, 57) if not torch.equal(squares[step], squares[step - 1])]

    expected = [*range(1, 17), *range(18, 49, 2), 52, 56]
    assert run_virtual(body, 2) == [expected] * 2


@pytest.mark.sizes(3)
def test_local_steps_and_exchanges_are_those_of_the_rule(ranks):
    """By hand: v frozen after 4 steps; then exchanges at 5, 6, then every second step, then every fourth."""
    options = {"variance_steps": 4, "local_steps": 2, "most_local": 4, **EXACT}
    results = ranks(lambda comm: go(comm, "zero_one_adam", options))
    size = len(results)
    serial = Serial()
    for step in range(4):
        mean = sum(gradients[step] for _, gradients in results) / size
        serial.m = serial.momentum(mean)
        serial.squares(mean)
        serial.move()
        close(results[0][0], serial, step)
    x, scale = serial.x, serial.scale
    thetas, moments = [x] * size, [serial.m] * size
    moves, rates, decays, exchanges = [torch.zeros_like(x)] * size, 0.0, 1.0, []
    for step in range(4, STEPS):
        eta, distance = rate(step), min(4, 2 ** ((step - 4) // 2))
        for rank, (_, gradients) in enumerate(results):
            moments[rank] = BETAS[0] * moments[rank] + (1 - BETAS[0]) * gradients[step]
            thetas[rank] = thetas[rank] - eta * (moments[rank] / scale + DECAY * thetas[rank])
            moves[rank] = moves[rank] - eta * moments[rank] / scale
        rates, decays = rates + eta, decays * (1 - eta * DECAY)
        if (step + 1) % distance == 0:
            exchanges.append(step + 1)
            z = sum(move * scale for move in moves) / size
            x = x * decays + z / scale
            thetas, moments = [x] * size, [-z / rates] * size
            moves, rates, decays = [torch.zeros_like(x)] * size, 0.0, 1.0
        for rank, (found, _) in enumerate(results):
            torch.testing.assert_close(found[step][0], thetas[rank], rtol=0, atol=1e-12)
            torch.testing.assert_close(found[step][1], moments[rank], rtol=0, atol=1e-11)
    assert exchanges == [5, 6, 8, 12]


def test_what_was_left_in_the_first_phase_is_forgotten_in_the_second():
    seen = []

    def look(strategy):
        if strategy.steps == 6:  # the last one of the first phase
            seen.append(strategy._mean.residuals[0].abs().max().item())
            assert strategy._mean.residuals[0].any()
            strategy._mean.residuals[0].fill_(1e6)  # would be seen in the next exchange

    options = {"variance_steps": 6, "full_steps": 1}
    plain, spoilt = (
        run_virtual(lambda comm, f=after: go(comm, "zero_one_adam", options, after=f)[0], 2)[0]
        for after in (lambda strategy: None, look)
    )
    assert all(torch.equal(a, b) for own, other in zip(plain, spoilt, strict=True) for a, b in zip(own, other)) and seen


def test_its_moments_are_found_where_adam_has_them():
    """A loop's own checkpoint, by the optimiser's state dict, has them; plain AdamW goes on from it."""

    def body(comm):
        module = problem.model()
        local = torch.optim.AdamW(module.parameters(), lr=0.01)
        strategy = problem.make(comm, "onebit_adam", module, local)
        batches = range(3)
        loops.by_strategy(strategy, local, batches, lambda step: replicas.backward(module, comm.rank, comm.size, step))
        plain = torch.optim.AdamW(problem.model().parameters(), lr=0.01)
        plain.load_state_dict(local.state_dict())
        return [(state["step"].item(), bool(state["exp_avg"].any())) for state in plain.state.values()]

    assert run_virtual(body, 2) == [[(3.0, True)] * 4] * 2


# --- a small ε --------------------------------------------------------------------------------------------------------
@each("name", ["onebit_adam", "zero_one_adam"])
def test_a_small_eps_is_warned_of_once(name, caplog):
    def body(comm, eps, **options):
        module = problem.model()
        local = torch.optim.AdamW(module.parameters(), **eps)
        strategy = problem.make(comm, name, module, local, **options)
        for step in range(2):
            replicas.backward(module, comm.rank, comm.size, step)
            strategy.step(local.step)
        strategy.close()

    caplog.clear()
    run_virtual(lambda comm: body(comm, {"eps": 1e-4}), 2)
    run_virtual(lambda comm: body(comm, {}, **EXACT), 2)
    run_virtual(lambda comm: body(comm, {}), 1)
    assert not caplog.records
    run_virtual(lambda comm: body(comm, {}), 2)
    (record,) = caplog.records
    assert f"eps of the optimiser is 1e-08, and should be at least 0.0001 with {name}" in record.getMessage()
