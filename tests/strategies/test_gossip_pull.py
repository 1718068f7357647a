"""Pull gossip: what is read while it is written leaves no trace."""

from __future__ import annotations

import torch

from harness.cases import each
from hpcdist.comm.virtual import run_virtual
from strategies import problem

NAME = "gossip_pull"


@each("overtaken", [0, 1, 3])
def test_a_reading_that_was_overtaken_leaves_no_trace(overtaken):
    """Parameters are read where they lie, and the own ones come back before the next attempt."""

    def body(comm):
        strategy = problem.make(comm, NAME, torch.nn.Linear(3, 2), draw_self=False)
        (own,) = strategy.model.params
        own.copy_(torch.arange(8.0) + comm.rank)
        strategy.load_state({"steps": 0, "peers": None})
        read, left = strategy._published.use_torn, [overtaken]

        def torn(function, out, rank):
            done = read(function, out, rank)
            if left[0]:
                left[0] -= 1
                own.fill_(float("nan"))  # as much as a torn mean may do
                return done - 2
            return done

        strategy._published.use_torn = torn
        strategy._mix()
        comm.barrier()
        found = own.clone()
        strategy.close()
        return found, strategy._published.retries

    for found, retries in run_virtual(body, 2):
        assert torch.equal(found, torch.arange(8.0) + 0.5)
        assert retries == overtaken


def test_alone_nothing_is_published():
    def body(comm):
        strategy = problem.make(comm, NAME, problem.model())
        published = strategy._published.own()
        strategy.step(lambda: None)
        strategy.close()
        return [len(tensor) for tensor in published]

    assert run_virtual(body, 1) == [[0]]
