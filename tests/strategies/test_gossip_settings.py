"""When gossips mix, with how many ranks, and with whom: against the same steps by hand, on the same draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.cases import each
from hpcdist.comm.virtual import run_virtual
from strategies import mixed, problem

pytestmark = pytest.mark.computes

every = each("name", ["gossip_pull", "gossip_push", "gossip_sync"])
COUNT = {"gossip_pull": "pulls", "gossip_push": "pushes"}
FEATURES, RATE, STEPS = 5, 0.3, 12


# --- steps by hand ----------------------------------------------------------------------------------------------------
def _target(rank):
    """What rank's loss, half the squared distance, draws its parameters to."""
    return np.sin(np.arange(FEATURES) * (rank + 1.0))


class _Peers:
    """Notes what each rank has drawn, by step."""

    def __init__(self, strategy):
        self.drawn, draw = {}, strategy.sampler.sample

        def noting(*args, **options):
            self.drawn[strategy.steps + 1] = draw(*args, **options)
            return self.drawn[strategy.steps + 1]

        strategy.sampler.sample = noting


def _in_step(comm, strategy, name):
    """Makes all ranks mix at the same time, so that what each one finds does not depend on who is faster."""
    synchronizes = {"gossip_pull": "mix", "gossip_push": "_average"}[name]
    mix = getattr(strategy, synchronizes)

    def meeting(*args):
        comm.barrier()
        mix(*args)
        comm.barrier()

    setattr(strategy, synchronizes, meeting)


def _steps(comm, name, options):
    """The parameters after each step of plain SGD on this rank's loss, what was drawn, and the records."""
    module = torch.nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(module.weight)
    strategy = problem.make(comm, name, module, seed=3, **options)
    local = torch.optim.SGD(module.parameters(), lr=RATE)
    peers = None
    if name != "gossip_sync":
        peers = _Peers(strategy)
        _in_step(comm, strategy, name)
    found, records, target = [], [], torch.from_numpy(_target(comm.rank))
    for _ in range(STEPS):
        module.weight.grad = (module.weight.detach() - target).clone()
        records.append(strategy.step(local.step))
        found.append(module.weight.detach().numpy()[0].copy())
    strategy.close()
    return np.stack(found), peers and peers.drawn, records


def _mixed(name, x, drawn):
    """The next rows of x, where rank i has drawn `drawn[i]`."""
    size, mixed = len(x), x.copy()
    for rank in range(size):
        others = (
            [peer for peer in drawn[rank] if peer != rank]
            if name == "gossip_pull"
            else [source for source in range(size) if source != rank and rank in drawn[source]]
        )
        weight = 2 if rank in drawn[rank] else 1
        mixed[rank] = (weight * x[rank] + sum((x[other] for other in others), np.zeros(FEATURES))) / (
            weight + len(others)
        )
    return mixed


@each("name", COUNT)
@each("order", ["after", "before"])
@each("case", [(1, 1, True), (3, 1, True), (1, 2, False), (2, 3, True)])
def test_steps_are_those_of_a_simulation_with_the_same_peers(name, order, case):
    """Every step: mix and then descend along the gradient of before, or the other way round."""
    interval, count, include_self = case
    options = {"order": order, "interval": interval, COUNT[name]: count, "include_self": include_self}
    found = run_virtual(lambda comm: _steps(comm, name, options), 4)
    targets = np.stack([_target(rank) for rank in range(4)])
    x = np.zeros((4, FEATURES))
    for step in range(1, STEPS + 1):
        drawn = [peers.get(step) for _, peers, _ in found]
        assert all((peers is not None) == (step % interval == 0) for peers in drawn)
        change = -RATE * (x - targets)
        if order == "after":
            x = x + change
        if step % interval == 0:
            assert all(len(set(peers)) == count for peers in drawn)
            assert include_self or all(rank not in peers for rank, peers in enumerate(drawn))
            x = _mixed(name, x, drawn)
        if order == "before":
            x = x + change
        np.testing.assert_allclose(np.stack([values[step - 1] for values, *_ in found]), x, rtol=0, atol=1e-14)
    if interval == 1 and count > 1:
        assert any(rank in peers for rank, (_, of, _) in enumerate(found) for peers in of.values()) == include_self


@each("order", ["after", "before"])
@each("pairing", ["permutation", "matching"])
@each("interval", [1, 3])
@pytest.mark.sizes(3, 4)
def test_synchronous_steps_are_those_of_a_simulation_with_the_same_draws(ranks, order, pairing, interval):
    found = ranks(lambda comm: _steps(comm, "gossip_sync", {"order": order, "interval": interval, "pairing": pairing}))
    sources = mixed.sources(ranks, STEPS, seed=3, pairing=pairing)
    targets = np.stack([_target(rank) for rank in range(len(found))])
    x = np.zeros_like(targets)
    for step in range(1, STEPS + 1):
        change = -RATE * (x - targets)
        if order == "after":
            x = x + change
        if step % interval == 0:
            x = (x + x[sources[step - 1]]) / 2
        if order == "before":
            x = x + change
        np.testing.assert_allclose(np.stack([values[step - 1] for values, *_ in found]), x, rtol=0, atol=1e-14)


# --- bytes ------------------------------------------------------------------------------------------------------------
@every
@each("interval", [1, 4])
def test_bytes_are_moved_in_the_steps_that_mix(name, interval):
    options = {"interval": interval, "include_self": False, **({COUNT[name]: 2} if name in COUNT else {})}
    runs = run_virtual(lambda comm: problem.train(comm, name, options, epochs=1), 4)
    n_bytes = runs[0].params[0].nbytes * (2 if name in COUNT else 1)
    for run in runs:
        assert len(run.records) == 15
        for record in run.records:
            moved = record.bytes_fetched if name == "gossip_pull" else record.bytes_sent
            parameters, words = divmod(moved, n_bytes)  # beside them are counts and the like
            assert parameters == (record.step % interval == 0) and words < 200


@every
def test_a_draw_of_oneself_moves_nothing(name):
    runs = problem.virtual({}, 4, name, epochs=1)
    moved = [r.bytes_fetched if name == "gossip_pull" else r.bytes_sent for run in runs for r in run.records]
    assert {n_bytes // runs[0].params[0].nbytes for n_bytes in moved} == {0, 1}


def test_a_message_pushed_in_between_is_averaged_in_the_next_step_whatever_the_interval():
    """Rank 1 pushes in step 3; rank 0, which mixes in its own step 3, has it in its step 1."""

    def body(comm):
        strategy = problem.make(comm, "gossip_push", torch.nn.Linear(3, 1, dtype=torch.float64), interval=3)
        strategy.model.params[0].fill_(comm.rank)
        strategy.sampler.sample = lambda *_, **__: [0]
        if comm.rank == 1:
            for _ in range(3):
                strategy.step(lambda: None)
        comm.barrier()
        if comm.rank == 0:
            strategy.step(lambda: None)
        found = strategy.model.params[0][0].item()
        strategy.close()
        return found

    assert run_virtual(body, 2) == [0.5, 1.0]
