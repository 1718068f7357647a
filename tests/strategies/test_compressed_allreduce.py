"""All-reduce of compressed gradients: replicas stay equal, nothing is lost, and exact compressors change nothing."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from harness.cases import each
from harness.worlds import saved as saved_state
from harness.worlds import take_up
from strategies import problem

pytestmark = pytest.mark.computes

OPTIONS = {
    "dgc": {"ratio": 0.2},
    "onebit": {"means": "row"},
    "powersgd": {"rank": 1},
    "threshold": {"density": 0.2},
    "topk": {"ratio": 0.2},
}

every = each("name", ["dgc", "onebit", "powersgd", "qsgd", "terngrad", "topk"])  # one for each kind of state


def options(name: str, **more) -> dict:
    return {"compression": {"name": name, **OPTIONS.get(name, {}), **more}}


@each("name", ["signsgd", "terngrad"])
@pytest.mark.sizes(3)
def test_it_learns_and_replicas_stay_equal(ranks, name):
    """By those whose sums of gradients are not kept."""
    runs = problem.learns(ranks, "allreduce", options(name, warmup_steps=2), epochs=2, below=0.9)
    assert all(torch.equal(run.params[0], runs[0].params[0]) for run in runs)


@pytest.mark.sizes(3)
@each("compression", [{"name": "powersgd", "rank": 8}, "dense"])
def test_where_nothing_is_left_out_it_equals_the_dense_one(ranks, compression):
    if compression == "dense":
        compression = options("onebit", warmup_steps=1000)["compression"]

    def body(comm):
        given = {"compression": compression}
        return [problem.train(comm, "allreduce", options) for options in (given, {})]

    for compressed, dense in ranks(body):
        torch.testing.assert_close(compressed.params[0], dense.params[0], rtol=0, atol=1e-12)


class _Steps:
    """Steps of a strategy on the problem's samples."""

    def __init__(self, comm, given: dict):
        self.comm, self.module = comm, problem.model()
        self.local = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9)
        self.strategy = problem.make(comm, "allreduce", self.module, **given)

    def take(self, steps: range, bad: bool = False) -> None:
        for step in steps:
            self.local.zero_grad()
            first = (step * self.comm.size + self.comm.rank) * 4 % 200
            poisons = bad and self.comm.rank == 0
            with problem.poisoned(next(self.module.parameters())) if poisons else nullcontext():
                problem.loss(self.module, range(first, first + 4)).backward()
            self.strategy.step(self.local.step)

    def params(self) -> torch.Tensor:
        return self.strategy.model.params[0].clone()

    def residual(self) -> torch.Tensor:
        return self.strategy.state.save()["compressed.residual"][0].clone()


@every
@pytest.mark.sizes(3)
def test_a_step_that_is_left_out_leaves_what_is_to_be_sent_as_it_is(ranks, name):
    def body(comm):
        run = _Steps(comm, {"on_nonfinite": "skip", **options(name)})
        run.take(range(3))
        params, residual = run.params(), run.residual()
        run.take(range(3, 4), bad=True)
        assert torch.equal(run.params(), params) and torch.equal(run.residual(), residual)
        run.take(range(4, 6))
        assert not torch.equal(run.params(), params) and torch.isfinite(run.params()).all()
        run.strategy.close()
        return run.params()

    found = ranks(body)
    assert all(torch.equal(params, found[0]) for params in found)


@every
@pytest.mark.sizes(3)
def test_it_goes_on_from_another_number_of_ranks(ranks, name):
    def before(comm):
        run = _Steps(comm, options(name))
        run.take(range(5))
        found = saved_state(run.strategy), run.params()
        run.strategy.close()
        return found

    saved = ranks(before)
    states = [state for state, _ in saved] + [saved[0][0]]  # as of one rank more

    def after(comm):
        run = _Steps(comm, options(name))
        take_up(run.strategy, states)
        run.strategy.model.params[0].copy_(saved[0][1])
        state = run.strategy.state.save()
        along = {key: state[key][0].clone() for key in ("compressed.residual", "compressed.velocity") if key in state}
        run.take(range(5, 8))
        run.strategy.close()
        return run.params(), along, state["compressed.calls"]

    found = ranks(after)
    assert ("compressed.velocity" in found[0][1]) == (name == "dgc")
    for key in found[0][1]:
        own = [torch.cat([chunk.tensor.reshape(-1) for chunk in s.at("strategy", key).values()]) for s in states]
        assert name != "dgc" or not torch.equal(own[0], own[1]), "every rank has one of its own"
        for _, along, _ in found:
            torch.testing.assert_close(along[key], torch.stack(own).mean(dim=0), rtol=1e-13, atol=1e-17)
    assert all(torch.equal(params, found[0][0]) and calls == 5 for params, _, calls in found)
