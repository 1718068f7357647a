"""Pull and push gossip: whom they draw, what they move, and the mean, which is conserved in expectation only."""

from __future__ import annotations

import pytest
import torch

from harness.cases import each
from hpcdist.comm.virtual import Constant, Jitter, Network, Straggler, run_virtual
from strategies import problem

pytestmark = pytest.mark.computes

both = each("name", ["gossip_pull", "gossip_push"])


def _mix(comm, name, steps, seed, **options):
    """Gossip without learning; rank r starts at r. Its value after each step, the consensus, and its value then."""
    strategy = problem.make(comm, name, torch.nn.Linear(3, 2, dtype=torch.float64), seed=seed, **options)
    strategy.model.params[0].fill_(comm.rank)
    strategy.load_state(strategy.state())  # publishes these values
    values = []
    for _ in range(steps):
        comm.compute()
        strategy.step(lambda: None)
        values.append(strategy.model.params[0][0].item())
    consensus = strategy.consensus()[0][0][0].item()
    own = strategy.model.params[0][0].item()
    strategy.close()
    return values, consensus, own


@both
@each("size", [2, 4, 8, 16])
def test_ranks_that_mix_equally_often_come_to_agree_on_another_mean(size, name):
    found = run_virtual(lambda comm: _mix(comm, name, 80, seed=5), size, compute=Jitter(0.1, 0.3))
    last = [values[-1] for values, _, _ in found]
    assert max(last) - min(last) < 1e-3
    assert size == 2 or abs(sum(last) / size - (size - 1) / 2) > 1e-6


@both
def test_the_mean_is_conserved_in_expectation(name):
    size, seeds = 6, range(40)
    means = []
    for seed in seeds:
        found = run_virtual(lambda comm, s=seed: _mix(comm, name, 12, s), size, compute=Jitter(0.1, 0.2), seed=seed)
        means.append(sum(values[-1] for values, _, _ in found) / size)
    mean = sum(means) / len(means)
    deviation = (sum((m - mean) ** 2 for m in means) / (len(means) - 1)) ** 0.5 / len(means) ** 0.5
    assert abs(mean - (size - 1) / 2) < 4 * deviation
    assert 0 < deviation < 0.25


@each("case", [("gossip_pull", {}), ("gossip_pull", {"torn": True}), ("gossip_push", {})])
@pytest.mark.sizes(2, 4)
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
        drawn = [peer for _ in range(steps) for peer in strategy.draw.ranks()]
        strategy.comm.failures.living = (0, 2, 3)
        left = {peer for _ in range(50) for peer in strategy.draw.ranks()}
        strategy.close()
        return drawn, left

    found = run_virtual(body, size)
    assert len({tuple(drawn) for drawn, _ in found}) == size, "ranks draw alike"
    for drawn, left in found:
        assert all(abs(drawn.count(peer) - steps / size) < 5 * (steps * 3 / 16) ** 0.5 for peer in range(size))
        assert left == {0, 2, 3}


@both
def test_a_straggler_delays_nobody_and_receives_what_the_others_push(name):
    """All others do their steps in their own time, at no wait."""

    def body(comm):
        strategy = problem.make(comm, name, problem.model())
        took_s = problem.seconds(strategy, 20)
        comm.barrier()
        held = sum(count for _, count, _ in strategy.state().get("held", []))
        strategy.close()
        return took_s, held

    network = Network(latency_s=1e-4, bandwidth_bytes_s=1e9)
    found = run_virtual(body, 5, network=network, compute=Straggler(Constant(0.1), 2, 8.0))
    assert found[2][0] > 16
    assert all(took_s < 20 * 0.1 * 1.1 for rank, (took_s, _) in enumerate(found) if rank != 2)
    held = sum(held for rank, (_, held) in enumerate(found) if rank != 2)  # finished ranks receive too
    assert (held > 0) == (name == "gossip_push")


@both
def test_bytes_are_one_parameter_vector_per_foreign_draw(name):
    runs = run_virtual(lambda comm: problem.train(comm, name, epochs=1), 4)
    n_bytes = runs[0].params[0].nbytes
    for run in runs:
        moved = [(record.bytes_fetched, record.bytes_sent) for record in run.records]
        own, other = zip(*(pair if name == "gossip_pull" else pair[::-1] for pair in moved), strict=True)
        assert any(own) and not any(other)
        assert all(n == 0 or n_bytes <= n < n_bytes + 100 for n in own)  # beside them are a few words
