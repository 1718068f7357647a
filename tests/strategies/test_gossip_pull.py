"""Pull gossip: random peers, the mean conserved in expectation and not exactly, nobody waits."""

from __future__ import annotations

import pytest
import torch
from strategies import problem

from hpcdist.comm.virtual import Constant, Jitter, Network, Straggler, run_virtual

NAME = "gossip_pull"


def _mix(comm, steps, seed, torn=False):
    """Gossip without learning: rank r starts at r; each rank's values after each step."""
    strategy = problem.make(comm, NAME, torch.nn.Linear(3, 2, dtype=torch.float64), seed=seed, torn=torn)
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


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_ranks_that_mix_equally_often_come_to_agree(size):
    found = run_virtual(lambda comm: _mix(comm, 80, seed=5), size, compute=Jitter(0.1, 0.3))
    last = [values[-1] for values, _, _ in found]
    assert max(last) - min(last) < 1e-3


@pytest.mark.parametrize("size", [3, 4, 8, 16])
def test_the_mean_is_not_conserved_exactly(size):
    found = run_virtual(lambda comm: _mix(comm, 20, seed=5), size, compute=Jitter(0.1, 0.3))
    assert abs(sum(values[-1] for values, _, _ in found) / size - (size - 1) / 2) > 1e-6


def test_the_mean_is_conserved_in_expectation():
    size, seeds = 6, range(40)
    means = []
    for seed in seeds:
        found = run_virtual(lambda comm, seed=seed: _mix(comm, 12, seed), size, compute=Jitter(0.1, 0.2), seed=seed)
        means.append(sum(values[-1] for values, _, _ in found) / size)
    mean = sum(means) / len(means)
    deviation = (sum((m - mean) ** 2 for m in means) / (len(means) - 1)) ** 0.5 / len(means) ** 0.5
    assert abs(mean - (size - 1) / 2) < 4 * deviation
    assert deviation > 0


def test_peers_are_drawn_uniformly_oneself_included():
    size, steps = 4, 400

    def body(comm):
        strategy = problem.make(comm, NAME, torch.nn.Linear(1, 1), seed=3)
        drawn = []
        strategy._average_with = drawn.append
        for _ in range(steps):
            strategy.step(lambda: None)
        strategy.close()
        return drawn

    for rank, drawn in enumerate(run_virtual(body, size)):
        counts = [drawn.count(peer) for peer in range(size)]
        assert counts[rank] == 0
        counts[rank] = steps - len(drawn)  # drew itself: nothing to do
        assert all(abs(count - steps / size) < 5 * (steps * 3 / 16) ** 0.5 for count in counts)


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("torn", [False, True])
def test_the_evaluated_mean_is_exact_and_leaves_the_ranks_alone(ranks, torn):
    found = ranks(lambda comm: _mix(comm, 5, seed=1, torn=torn))
    mean = sum(values[-1] for values, _, _ in found) / len(found)
    for values, consensus, own in found:
        assert own == values[-1]
        assert consensus == pytest.approx(mean, abs=1e-14)


def test_a_straggler_delays_nobody():
    """All others do their steps in their own time, at no wait."""

    def body(comm):
        strategy = problem.make(comm, NAME, problem.model())
        took_s = problem.seconds(strategy, 20)
        strategy.close()
        return took_s

    network = Network(latency_s=1e-4, bandwidth_bytes_s=1e9)
    taken_s = run_virtual(body, 5, network=network, compute=Straggler(Constant(0.1), 2, 8.0))
    assert taken_s[2] > 16
    assert all(t < 20 * 0.1 * 1.1 for rank, t in enumerate(taken_s) if rank != 2)


def test_bytes_are_one_parameter_vector_per_foreign_draw():
    runs = run_virtual(lambda comm: problem.train(comm, NAME, epochs=1), 4)
    n_bytes = runs[0].params[0].nbytes
    for run in runs:
        for record in run.records:
            assert record.bytes_sent == 0
            assert record.bytes_fetched == 0 or n_bytes <= record.bytes_fetched < n_bytes + 100
        assert any(record.bytes_fetched for record in run.records)
