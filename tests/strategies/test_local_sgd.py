"""Local SGD: against synchronous SGD, the optimiser's state, in bytes and in time."""

from __future__ import annotations

import threading

import pytest
import torch

from harness.cases import each
from hpcdist.comm.virtual import run_virtual
from strategies import problem, replicas

pytestmark = pytest.mark.computes

NAME = "local_sgd"
STEPS = 14


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
@pytest.mark.sizes(3)
def test_the_state_that_a_rank_lacks_counts_as_zeros_and_is_made(ranks, optimizer):
    steps = 4

    def body(comm):
        torch.manual_seed(0)
        module = _Late()
        local = STATEFUL[optimizer](module.parameters())
        options = {"period": 1, "algorithm": "ring", "average_optimizer_state": True}
        strategy = problem.make(comm, NAME, module, **options)
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
        strategy = problem.make(comm, NAME, module, period=1, average_optimizer_state=True)
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
        may_go, mean = threading.Event(), strategy.average

        def late(*given):
            if not may_go.wait(timeout=30):
                raise TimeoutError("the step waits for its exchange")
            mean(*given)

        strategy.average = late
        values, _ = replicas.go(strategy, local, range(2))
        may_go.set()
        values += replicas.go(strategy, local, range(2, 3))[0]
        replicas.end(strategy)
        return torch.stack(values)

    values = torch.stack(ranks(body), dim=1)
    expected = replicas.by_hand(values.shape[1], "sgd", 3, period=2, overlap=True)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-12)
