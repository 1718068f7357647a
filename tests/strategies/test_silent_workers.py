"""Workers that post nothing for too long are left out, and taken in again; nobody waits for them meanwhile."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hpcdist import strategies
from hpcdist.comm.virtual import ComputeModel, Network, run_virtual
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from strategies import problem

SILENT, AT, LONG_S, STEP_S, DEADLINE_S = 3, 5, 50.0, 0.1, 2.0
SERVERS = [name for name in strategies.available() if "learner_deadline_s" in strategies.load(name).Config.model_fields]


class Hiccup(ComputeModel):
    """Every step takes 0.1 s, but one step of one rank very long."""

    def __init__(self):
        self._steps = Counter()

    def draw(self, rank, generator):
        self._steps[rank] += 1
        return LONG_S if rank == SILENT and self._steps[rank] == AT else STEP_S


def train(comm, name, steps=30, **options):
    """The records of this rank, the consensus, and when its own steps were done."""
    module = problem.model()
    local = torch.optim.SGD(module.parameters(), lr=0.02)
    cls = strategies.load(name)
    strategy = cls(cls.Config(**{"learner_deadline_s": DEADLINE_S, **options}), comm.split(0), FlatModel(module))
    records = []
    strategy.records.write = records.append
    if strategy.is_worker:
        for _ in range(steps):
            comm.compute()
            local.zero_grad()
            problem.loss(module, range(comm.rank * 8, comm.rank * 8 + 8)).backward()
            records.append(strategy.step(local.step))
        done_s = comm.now()
        strategy.pause()
    else:
        strategy.serve(local.step)
        done_s = comm.now()
    params = [p.clone() for p in strategy.consensus()[0]]
    strategy.close()
    return records, params, done_s


def run(name, **options):
    return run_virtual(lambda comm: train(comm, name, **options), 4, compute=Hiccup(), network=Network(1e-5, 1e9))


@pytest.mark.parametrize("name", SERVERS)
def test_the_others_do_not_wait_for_a_silent_worker_and_it_comes_back(name):
    (server, params, _), *workers = run(name, **problem.PERIODS.get(name, {}))
    for _, _, done_s in workers[:2]:
        assert done_s < 30 * STEP_S + 2 * DEADLINE_S, "it waited for the silent one"
    assert workers[2][2] > LONG_S
    said = [record.event for record in server if record.event and "dropped" not in record.event]
    assert said == [
        f"goes on without rank 3: it was silent for 2 s (learner_deadline_s is {DEADLINE_S:g})",
        "rank 3 is back",
    ]
    assert all(torch.isfinite(p).all() for p in params)


def test_hardsync_goes_on_with_those_that_remain_and_drops_what_comes_too_late():
    (server, _, _), *_ = run("hardsync")
    sizes = Counter(len(record.staleness) for record in server if record.staleness)
    assert set(sizes) == {1, 2, 3}, "all three, two while one was silent, that one alone at the end"
    assert all(set(record.staleness) == {0} for record in server if record.staleness)
    assert sum(record.dropped for record in server) == 1
    late = [record.event for record in server if record.dropped]
    assert late == ["dropped: a gradient of rank 3 missed 26 updates"]


def test_hardsync_weights_those_that_remain_by_their_samples():
    """Two workers with 8 samples each give what one process with these 16 gives."""
    (_, params, _), *_ = run("hardsync", steps=AT)  # the silent one's last gradient comes too late for an update
    module = problem.model()
    local = torch.optim.SGD(module.parameters(), lr=0.02)
    for step in range(AT):
        ranks = (1, 2, 3) if step < AT - 1 else (1, 2)
        local.zero_grad()
        problem.loss(module, [i for r in ranks for i in range(r * 8, r * 8 + 8)]).backward()
        local.step()
    expected = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    torch.testing.assert_close(params[0], expected, rtol=0, atol=1e-12)


def test_without_a_deadline_hardsync_waits():
    *_, (_, _, done_s) = run("hardsync", learner_deadline_s=None)
    assert done_s > LONG_S


@pytest.mark.parametrize("name", SERVERS)
def test_a_deadline_for_colocated_servers_is_refused(name):
    with pytest.raises(ConfigError, match="learner_deadline_s must be none where strategy.servers is 'colocated'"):
        strategies.load(name).Config(servers="colocated", learner_deadline_s=1.0)
