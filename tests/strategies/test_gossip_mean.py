"""Pull and push gossip: whom they draw, and the mean; what is read while it is written leaves no trace."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist.comm.virtual import run_virtual
from strategies import problem

pytestmark = pytest.mark.computes

both = each("name", ["gossip_pull", "gossip_push"])


def _mix(comm, name, steps, seed, **options):
    """Gossip without learning; rank r starts at r. Its value after each step, the consensus, and its value then."""
    strategy = problem.make(comm, name, torch.nn.Linear(3, 2, dtype=torch.float64), seed=seed, **options)
    strategy.model.params[0].fill_(comm.rank)
    strategy.state.load(strategy.state.save())  # publishes these values
    values = []
    for _ in range(steps):
        comm.compute()
        strategy.step(lambda: None)
        values.append(strategy.model.params[0][0].item())
    consensus = strategy.consensus()[0][0][0].item()
    own = strategy.model.params[0][0].item()
    strategy.close()
    return values, consensus, own


@each("case", [("gossip_pull", {}), ("gossip_pull", {"torn": True}), ("gossip_push", {})])
@pytest.mark.sizes(4)
def test_the_evaluated_mean_is_exact_and_leaves_the_ranks_alone(ranks, case):
    name, options = case
    found = ranks(lambda comm: _mix(comm, name, 5, seed=1, **options))
    mean = sum(values[-1] for values, _, _ in found) / len(found)
    for values, consensus, own in found:
        assert own == values[-1]
        assert consensus == pytest.approx(mean, abs=1e-14)


@both
def test_peers_are_drawn_uniformly_oneself_included_but_not_the_dead(name):
    size, steps = 4, 400

    def body(comm):
        strategy = problem.make(comm, name, torch.nn.Linear(1, 1), seed=3)
        drawn = [peer for _ in range(steps) for peer in strategy.sampler.sample()]
        strategy.comm.failures.alive = (0, 2, 3)
        left = {peer for _ in range(50) for peer in strategy.sampler.sample()}
        strategy.close()
        return drawn, left

    found = run_virtual(body, size)
    assert len({tuple(drawn) for drawn, _ in found}) == size, "ranks draw alike"
    for drawn, left in found:
        assert all(abs(drawn.count(peer) - steps / size) < 5 * (steps * 3 / 16) ** 0.5 for peer in range(size))
        assert left == {0, 2, 3}


@each("overtaken", [0, 1, 3])
def test_a_reading_that_was_overtaken_leaves_no_trace(overtaken):
    """Parameters are read where they lie, and the own ones come back before the next attempt."""

    def body(comm):
        strategy = problem.make(comm, "gossip_pull", torch.nn.Linear(3, 2), include_self=False)
        (own,) = strategy.model.params
        own.copy_(torch.arange(8.0) + comm.rank)
        strategy.state.load({"steps": 0, "peers": None})
        read, left = strategy._published.use_torn, [overtaken]

        def torn(function, out, rank):
            done = read(function, out, rank)
            if left[0]:
                left[0] -= 1
                own.fill_(float("nan"))  # as much as a torn mean may do
                return done - 2
            return done

        strategy._published.use_torn = torn
        strategy.mix(due=True)
        comm.barrier()
        found = own.clone()
        strategy.close()
        return found, strategy._published.retries

    for found, retries in run_virtual(body, 2):
        assert torch.equal(found, torch.arange(8.0) + 0.5)
        assert retries == overtaken
