"""Pull and push gossip: the mean of all ranks is conserved in expectation and not exactly, and evaluated exactly."""

from __future__ import annotations

import pytest
import torch

from hpcdist.comm.virtual import Jitter, run_virtual
from strategies import problem

pytestmark = pytest.mark.computes

both = pytest.mark.parametrize("name", ["gossip_pull", "gossip_push"])


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
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_ranks_that_mix_equally_often_come_to_agree(size, name):
    found = run_virtual(lambda comm: _mix(comm, name, 80, seed=5), size, compute=Jitter(0.1, 0.3))
    last = [values[-1] for values, _, _ in found]
    assert max(last) - min(last) < 1e-3


@both
@pytest.mark.parametrize("size", [3, 4, 8, 16])
def test_the_mean_is_not_conserved_exactly(size, name):
    found = run_virtual(lambda comm: _mix(comm, name, 20, seed=5), size, compute=Jitter(0.1, 0.3))
    assert abs(sum(values[-1] for values, _, _ in found) / size - (size - 1) / 2) > 1e-6


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


@pytest.mark.parametrize(
    ("name", "options"), [("gossip_pull", {}), ("gossip_pull", {"torn": True}), ("gossip_push", {})]
)
@pytest.mark.sizes(2, 4)
def test_the_evaluated_mean_is_exact_and_leaves_the_ranks_alone(ranks, name, options):
    found = ranks(lambda comm: _mix(comm, name, 5, seed=1, **options))
    mean = sum(values[-1] for values, _, _ in found) / len(found)
    for values, consensus, own in found:
        assert own == values[-1]
        assert consensus == pytest.approx(mean, abs=1e-14)
