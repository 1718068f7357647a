"""Local SGD: against synchronous SGD, the optimiser's state, in bytes and in time."""

from __future__ import annotations

import threading

import pytest
import torch

import hpcdist as hd
from harness.cases import each
from hpcdist import strategies
from hpcdist.comm.virtual import Jitter, run_virtual
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from strategies import problem, replicas

pytestmark = pytest.mark.computes

NAME = "local_sgd"
STEPS = 14
LINEAR = {
    "sgd": problem.OPTIMIZERS["sgd"],
    "momentum": problem.OPTIMIZERS["momentum"],
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
}


@each("state", [False, True])
@each("optimizer", LINEAR)
@pytest.mark.sizes(2, 3)
def test_with_a_period_of_1_and_momentum_it_is_synchronous_sgd(ranks, optimizer, state):
    """Where batches are equal: every rank counts alike."""
    options = {"period": 1, "average_optimizer_state": state}

    def body(comm):
        own = problem.train(comm, NAME, options, optimizer=LINEAR[optimizer], epochs=1)
        return own, problem.train(comm, "allreduce", optimizer=LINEAR[optimizer], epochs=1)

    for own, synchronous in ranks(body):
        torch.testing.assert_close(own.params[0], synchronous.params[0], rtol=0, atol=1e-12)


@pytest.mark.sizes(2, 3, 4)
def test_with_adam_it_is_not_and_its_state_matters(ranks):
    def body(comm):
        runs = [
            problem.train(comm, *how, optimizer="adam", epochs=4)
            for how in (("allreduce",), (NAME, {"period": 1, "average_optimizer_state": True}), (NAME, {"period": 1}))
        ]
        return [(run.params[0], run.consensus) for run in runs]

    module = problem.model()
    start = problem.loss(module, range(problem.SAMPLES)).item()
    for found in ranks(body):
        synchronous, averaged, kept = (params for params, _ in found)
        assert (synchronous - averaged).abs().max() > 1e-3
        assert (averaged - kept).abs().max() > 1e-3
        for _, consensus in found:
            problem.load(module, consensus)
            assert problem.loss(module, range(problem.SAMPLES)).item() < 0.5 * start


@pytest.mark.sizes(2, 4, 7)
def test_replicas_are_equal_to_the_bit_after_each_average_and_not_between(ranks):
    options = {"period": 4, "node_period": 2, "warmup_steps": 2, "average_optimizer_state": True}
    found = ranks(lambda comm: replicas.train(comm, NAME, options, "adam", STEPS)[0], network=replicas.PAIRS)
    values = torch.stack(found, dim=1)
    for step in range(1, STEPS + 1):
        distinct = len(values[step - 1].unique(dim=0))
        size, after = len(found), step - 2
        expected = 1 if after <= 0 or after % 4 == 0 else -(-size // 2) if after % 2 == 0 else size
        assert distinct == expected, f"after step {step}"


# --- the optimiser's state --------------------------------------------------------------------------------------------
class _Late(torch.nn.Module):
    """A rank has a gradient of a layer from some step on, which is not the same on all; of the last one never."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2, dtype=torch.float64) for _ in range(3))

    def forward(self, x, rank, step):
        return sum(self.layers[k](x).sum() for k in range(2) if (k - rank) % 2 <= step)


STATEFUL = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "no state": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
}


@each("optimizer", STATEFUL)
@pytest.mark.sizes(2, 3)
def test_the_state_that_a_rank_lacks_counts_as_zeros_and_is_made(ranks, optimizer):
    steps = 4

    def body(comm):
        torch.manual_seed(0)
        module = _Late()
        local = STATEFUL[optimizer](module.parameters())
        cls = strategies.load(NAME)
        config = cls.Config(period=1, algorithm="ring", average_optimizer_state=True)
        strategy = cls(config, comm.split(0), FlatModel(module))
        strategy.optimizer = local
        x = torch.ones(1, 2, dtype=torch.float64) + comm.rank
        before, after = [], []
        for step in range(steps):
            local.zero_grad()
            module(x, comm.rank, step).backward()
            strategy.step(lambda: (local.step(), before.append(_state(module, local))))
            after.append(_state(module, local))
        strategy.close()
        return before, after

    found = ranks(body)
    for step in range(steps):
        before, after = ([of_rank[i][step] for of_rank in found] for i in (0, 1))
        for parameter in {parameter for state in before for parameter in state}:
            had = [state.get(parameter, {}) for state in before]
            got = [state.get(parameter, {}) for state in after]
            for name in {name for state in had for name in state}:
                have = [state.get(name) for state in had]
                first = next(value for value in have if value is not None)
                if optimizer == "adafactor" and parameter.endswith("weight"):  # of other shapes than the weight
                    expected = have
                elif isinstance(first, float):
                    expected = [first if value is None else value for value in have]
                else:
                    expected = [sum(value for value in have if value is not None) / len(have)] * len(have)
                torch.testing.assert_close([state.get(name) for state in got], expected, rtol=0, atol=1e-14)
    known = {"no state": 0, "adafactor": 2}.get(optimizer, 4)
    assert all(len(after[-1]) >= known for _, after in found), "of two layers; the third has no gradient"
    assert not any("2" in parameter for _, after in found for parameter in after[-1])


def _state(module, local):
    """Of each parameter that has one, by name: copies of its tensors, and numbers."""
    return {
        name: {what: v.item() if v.dim() == 0 else v.clone() for what, v in local.state[p].items()}
        for name, p in module.named_parameters()
        if local.state.get(p)
    }


@pytest.mark.sizes(2, 3)
def test_the_state_of_complex_parameters_is_averaged_too(ranks):
    def body(comm):
        module = torch.nn.Linear(2, 2, dtype=torch.complex128)
        module.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float32))
        local = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        cls = strategies.load(NAME)
        strategy = cls(cls.Config(period=1, average_optimizer_state=True), comm.split(0), FlatModel(module))
        strategy.optimizer = local
        for parameter in module.parameters():
            imaginary = 1j * comm.rank**2 if parameter.is_complex() else 0
            parameter.grad = torch.full_like(parameter, comm.rank + imaginary)
        strategy.step(local.step)
        strategy.close()
        return [set(local.state[p]["momentum_buffer"].reshape(-1).tolist()) for p in module.parameters()]

    found = ranks(body)
    size = len(found)
    real, imaginary = sum(range(size)) / size, sum(r * r for r in range(size)) / size
    for (weight,), (bias,), (scale,) in found:
        assert weight == bias == pytest.approx(complex(real, imaginary))
        assert scale == pytest.approx(real)


@pytest.mark.sizes(1, 2, 4)
def test_the_optimiser_is_known_in_the_users_own_loop(ranks):
    def body(comm):
        hd.init(comm=comm)
        model = torch.nn.Linear(2, 1)
        local = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = hd.DistributedOptimizer(local, model, NAME, period=2, average_optimizer_state=True)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.full((1, 2), comm.rank + 1.0)).sum().backward()
            optimizer.step()
        saved = optimizer.state_dict()["state"]
        optimizer.strategy.close()
        return [saved[i][name].tolist() for i in saved for name in ("exp_avg", "exp_avg_sq")]

    found = ranks(body)
    assert all(state == found[0] for state in found)


# --- what it costs ----------------------------------------------------------------------------------------------------
def test_the_averaged_state_costs_as_much_again():
    def body(comm, state):
        _, records = replicas.train(comm, NAME, {"period": 2, "average_optimizer_state": state}, "adam", 12)
        return [record.bytes_sent for record in records[2:]]  # at first ranks tell which state they have

    (alone, *_), (with_state, *_) = (run_virtual(lambda comm, s=s: body(comm, s), 2) for s in (False, True))
    assert with_state == [3 * n for n in alone] and max(alone) > 0


@pytest.mark.mpi(min_size=2)
def test_an_exchange_does_not_hold_up_the_step_that_begins_it(ranks):
    def body(comm):
        strategy, local = replicas.make(comm, NAME, {"period": 2, "overlap": True}, "sgd")
        may_go, mean = threading.Event(), strategy.exchanges.mean

        def late(*given):
            if not may_go.wait(timeout=30):
                raise TimeoutError("the step waits for its exchange")
            mean(*given)

        strategy.exchanges.mean = late
        values, _ = replicas.go(strategy, local, range(2))
        may_go.set()
        values += replicas.go(strategy, local, range(2, 3))[0]
        replicas.end(strategy)
        return torch.stack(values)

    values = torch.stack(ranks(body), dim=1)
    expected = replicas.by_hand(values.shape[1], "sgd", 3, period=2, overlap=True)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-12)


def test_ranks_wait_for_each_other_only_at_averages():
    """The slowest of sums of many steps is less behind than the sum of the slowest ones."""

    def body(comm, period):
        return problem.train(comm, NAME, {"period": period}, epochs=4).seconds

    taken = [max(run_virtual(lambda c, h=h: body(c, h), 8, compute=Jitter(0.1, 0.3))) for h in (1, 5, 15)]
    assert taken[0] > 1.15 * taken[1] > 1.15 * 1.05 * taken[2]


# --- settings ---------------------------------------------------------------------------------------------------------
def test_settings_that_are_refused():
    cls = strategies.load(NAME)
    with pytest.raises(ConfigError, match=r"strategy.node_period must be less than strategy.period, 4; got 4\. Avera"):
        cls.Config(period=4, node_period=4)
    with pytest.raises(ConfigError, match="strategy.average_optimizer_state must be false where strategy.overlap is"):
        cls.Config(overlap=True, average_optimizer_state=True)

    def body(comm):
        strategy, local = replicas.make(comm, NAME, {"period": 1, "average_optimizer_state": True}, "adam")
        strategy.optimizer = None
        replicas.go(strategy, local, range(1))

    with pytest.raises(ConfigError, match="strategy.optimizer must be the local optimiser where strategy.average_opt"):
        run_virtual(body, 2)
