"""Workers that post nothing for too long are left out, and taken in again; nobody waits for them meanwhile."""

from __future__ import annotations

from collections import Counter

import torch

from harness import loops
from harness.cases import each
from hpcdist import strategies
from hpcdist.comm.virtual import ComputeModel, Network, run_virtual
from strategies import problem

SILENT, AT, LONG_S, STEP_S, DEADLINE_S = 3, 5, 50.0, 0.1, 2.0
SERVERS = [name for name in strategies.available() if "learner_deadline_s" in strategies.load(name).Config.model_fields]


class Hiccup(ComputeModel):
    """Every step takes 0.1 s, but one step of one rank very long."""

    def __init__(self):
        self._steps = Counter()

    def sample(self, rank, generator):
        self._steps[rank] += 1
        return LONG_S if rank == SILENT and self._steps[rank] == AT else STEP_S


def train(comm, name, steps=30, **options):
    """The records of this rank, the consensus, and when its own steps were done."""
    module = problem.model()
    local = torch.optim.SGD(module.parameters(), lr=0.02)
    strategy = problem.make(comm, name, module, **{"learner_deadline_s": DEADLINE_S, **options})
    records, ended_s = [], []
    strategy.records.write = records.append

    def backward(step):
        problem.loss(module, range(comm.rank * 8, comm.rank * 8 + 8)).backward()

    def look(step):
        ended_s.append(comm.now())

    records += loops.by_strategy(strategy, local, range(steps), backward, after=look)
    params = [p.clone() for p in strategy.consensus()[0]]
    strategy.close()
    return records, params, ended_s[-1] if ended_s else comm.now()


def run(name, **options):
    return run_virtual(lambda comm: train(comm, name, **options), 4, compute=Hiccup(), network=Network(1e-5, 1e9))


@each("name", SERVERS)
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
    torch.testing.assert_close(params[0], loops.vector(module), rtol=0, atol=1e-12)
