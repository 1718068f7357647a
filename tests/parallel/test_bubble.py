"""Steps on the virtual clock take as long as simulations of tables say, whose bubbles are those of the papers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from hpcdist.comm.virtual import Constant, Network, run_virtual
from hpcdist.parallel import Grid, Pipeline, schedules

STEP_S = 1.0  # of the whole model on one rank
THIRDS = {"F": 1, "B": 2, "I": 1, "W": 1}
AGAIN = THIRDS | {"B": 3, "I": 2}  # with recomputation


def step_s(schedule: str, ranks: int, micro_batches: int, chunks: int = 1, network=None, recompute=False) -> float:
    """The time of the second step; in the first one the ranks tell one another what they will send."""

    def body(comm):
        model = [nn.Linear(4, 4) for _ in range(ranks * chunks)]
        course = {"micro_batches": micro_batches, "schedule": schedule, "chunks": chunks, "recompute": recompute}
        pipeline = Pipeline(model, mse_loss, Grid(comm, ranks, spread=True), **course)
        x = torch.ones(2 * micro_batches, 4)
        pipeline.forward_backward(x, x)
        comm.barrier()
        start = comm.now()
        pipeline.forward_backward(x, x)
        end = comm.now()
        pipeline.close()
        return start, end

    times = run_virtual(body, ranks, network=network, compute=Constant(STEP_S))
    return max(end for _, end in times) - min(start for start, _ in times)


def predicted_s(schedule: str, ranks: int, micro_batches: int, chunks=1, message_s=0.0, recompute=False) -> float:
    thirds = AGAIN if recompute else THIRDS
    seconds = {kind: third / 3 * STEP_S / ranks / chunks / micro_batches for kind, third in thirds.items()}
    table = schedules.create(schedule, ranks, micro_batches, chunks)
    return schedules.simulate(table, seconds, lambda operation: message_s).makespan_s


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "chunks"),
    [
        ("gpipe", 2, 3, 1), ("gpipe", 2, 3, 2), ("one_f_one_b", 4, 6, 1), ("interleaved", 2, 3, 2),
        ("interleaved", 3, 2, 3), ("zero_bubble", 3, 5, 1), ("zero_bubble", 4, 2, 1),
    ],
)  # fmt: skip
def test_a_simulation_predicts_the_time(schedule, stages, micro_batches, chunks):
    for recompute in (False, True):
        exact = predicted_s(schedule, stages, micro_batches, chunks, recompute=recompute)
        assert step_s(schedule, stages, micro_batches, chunks, recompute=recompute) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("schedule", schedules.available())
def test_a_simulation_predicts_the_time_of_messages(schedule):
    """And the last message, by which the last stage tells the loss: rank 0, which ends last, has it before."""
    latency_s = 0.01 * STEP_S
    found = step_s(schedule, 3, 4, network=Network(latency_s, math.inf))
    assert found == pytest.approx(predicted_s(schedule, 3, 4, message_s=latency_s), rel=1e-9)
