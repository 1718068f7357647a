"""The seam, as strategies see it: 12 steps of each on real ranks are those of its run on virtual ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest

from harness.cases import each
from hpcdist import strategies
from hpcdist.comm.virtual import Constant, run_virtual
from strategies import problem

STEPS, BATCH = 12, 3
ROUNDING = 1e-13  # a library may add up in another order


def train(comm, name: str) -> tuple[list[float], list[float], list[list[int]], int]:
    """Collective. This rank's parameters, the consensus, the staleness of each record, and gradients not applied."""
    cls = strategies.load(name)
    workers = cls.Config().workers(comm.size)
    group = comm.split(0 if comm.rank in workers else 1)
    turns = nullcontext if cls.contract.synchronous else _turns(group)
    samples = STEPS * BATCH * len(workers)
    options = problem.PERIODS.get(name, {})
    run = problem.train(comm, name, options, batch=BATCH, samples=samples, epochs=1, turns=turns)
    group.close()
    staleness = [list(record.staleness) for record in run.records]
    return run.params[0].tolist(), run.consensus[0].tolist(), staleness, run.pending


def _turns(group) -> Callable:
    """Workers that don't meet step one after the other, so that chance has no part in what they find."""

    @contextmanager
    def turn() -> Iterator[None]:
        for _ in range(group.rank):
            group.barrier()
        yield
        if group.mpi is not None:
            time.sleep(0.002)  # on a busy machine a barrier may be over before a message is seen
        for _ in range(group.rank, group.size):
            group.barrier()

    return turn


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@each("name", strategies.available())
def test_a_strategy_takes_the_same_steps_on_real_and_on_virtual_ranks(ranks, name):
    """On one node, and where each rank is on a node of its own: windows are then read and written over the network."""

    def body(comm):
        expected = run_virtual(lambda virtual: train(virtual, name), comm.size, compute=Constant(0.01))
        far = comm.apart()
        found = {"one node": train(comm, name), "own nodes": train(far, name)}
        far.close()
        return found, expected[comm.rank]

    for rank, (found, expected) in enumerate(ranks(body)):
        for where, own in found.items():
            place = f"rank {rank}, {where}"
            assert own[2:] == expected[2:], f"{place}: records must be those of virtual ranks"
            for i, what in enumerate(("parameters", "consensus")):
                assert own[i] == pytest.approx(expected[i], rel=0, abs=ROUNDING), f"{what} of {place}"
