"""Stale synchronous parallel: a bound on how far ahead anybody reads, kept at every read under any straggler."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from harness import loops
from harness.cases import each
from hpcdist.comm.virtual import Constant, Exponential, Straggler, run_virtual
from strategies import problem

pytestmark = pytest.mark.computes

NAME = "ssp"
_train = partial(problem.virtual, name=NAME)
SLOW = Straggler(Constant(0.1), 2, 4.0)


@each("bound", [0, 2])
def test_a_read_includes_what_every_worker_had_done_by_then_and_ones_own_step(bound):
    """The gradients in a reply's parameters, counted: 1 per gradient at a learning rate of 1."""
    size, steps = 4, 12
    workers = size - 1

    def body(comm):
        module = torch.nn.Linear(workers, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(module.weight)
        strategy = problem.make(comm, NAME, module, bound=bound)
        found = []

        def backward(step):
            module.weight.grad = torch.zeros(1, workers, dtype=torch.float64)
            module.weight.grad[0, comm.rank - 1] = -workers  # divided by the number of workers: 1

        def look(step):
            found.append((step + 1, module.weight.detach().flatten().round(decimals=9).tolist()))

        local = torch.optim.SGD(module.parameters(), lr=1.0)
        loops.by_strategy(strategy, local, range(steps), backward, after=look)
        strategy.close()
        return found

    for rank, found in enumerate(run_virtual(body, size, compute=Straggler(Exponential(0.1), 1, 3.0))[1:]):
        for clock, seen in found:
            assert seen[rank] == clock, "not its own writes"
            assert min(seen) >= clock - bound, "not all updates of workers with clock < c - s"
        assert rank == 0 or any(min(seen) == clock - bound for clock, seen in found), "the bound isn't used"


@each("optimizer", ["momentum", "adam"])
@each("servers", [2, "colocated"])
def test_a_bound_of_0_is_hardsync_to_the_bit(optimizer, servers):
    size = 3 if servers == "colocated" else 3 + servers
    settings = {"optimizer": optimizer, "samples": 50, "compute": Exponential(0.1)}
    runs = _train({"bound": 0, "servers": servers}, size, **settings)
    hard = _train({"servers": servers}, size, name="hardsync", **settings)
    assert all(torch.equal(a.consensus[0], b.consensus[0]) for a, b in zip(runs, hard, strict=True))
    assert {s for run in runs for s in run.staleness} == {0}
    assert runs[0].seconds == hard[0].seconds


def test_the_records_say_who_held_a_worker_up_and_for_how_long():
    """Once the fast ones are 2 steps ahead, they are held up 0.3 s of the straggler's 0.4 s at every step."""
    runs = _train({"bound": 2}, 4, compute=SLOW, epochs=1, batch=2)
    steps = len(runs[1].records)
    assert all(record.waited_for == {} for record in runs[2].records)
    for run in (runs[1], runs[3]):
        held = [record.waited_for for record in run.records if record.waited_for]
        assert all(set(found) == {2} for found in held)
        assert sum(found[2] for found in held) == pytest.approx(0.3 * steps, rel=0.1)
        assert [found[2] for found in held][3:-3] == pytest.approx([0.3] * (len(held) - 6), abs=1e-6)
        assert sum(record.waiting_s for record in run.records) == pytest.approx(sum(f[2] for f in held), rel=1e-5)
    assert runs[0].seconds == pytest.approx(0.4 * steps)
