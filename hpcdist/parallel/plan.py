"""The prediction of a pipeline from the costs of its layers: stages, time of a step, memory of each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigError
from hpcdist.parallel import schedules
from hpcdist.parallel.cost import LayerCost
from hpcdist.parallel.cut import Cut, balance, by_hand
from hpcdist.parallel.schedules import Operation, Table, Timing
from hpcdist.parallel.schedules.base import peak

EQUAL = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # seconds of operations in equal stages
_SUMMED = ("forward_s", "backward_s", "inputs_s", "parameter_bytes", "activation_bytes")


@dataclass(frozen=True)
class StageCost:
    """A stage's cost for one micro-batch; see LayerCost."""

    stage: int
    rank: int
    layers: range  # their numbers
    forward_s: float
    backward_s: float
    inputs_s: float
    parameter_bytes: int
    activation_bytes: int
    received_bytes: int  # at the boundary before the stage
    sent_bytes: int  # at the boundary after it


@dataclass(frozen=True)
class Plan:
    """A predicted pipeline."""

    schedule: str  # its name
    table: Table
    cut: Cut
    stages: tuple[StageCost, ...]
    timing: Timing  # of the table with these costs
    equal_bubble: float  # idle share with equal stages, whose backward passes take twice as long as forward passes
    memory_bytes: tuple[int, ...]  # by rank: parameters, gradients, optimiser's state, activations at their peak

    def as_dict(self) -> dict[str, Any]:
        """Return everything except the table, as values of JSON."""
        ranks = zip(self.timing.bubbles, self.timing.peaks, self.memory_bytes)
        return {
            "schedule": self.schedule,
            "cut": list(self.cut.sizes),
            "step_s": self.timing.makespan_s,
            "bubble": self.timing.bubble,
            "equal_bubble": self.equal_bubble,
            "stages": [asdict(stage) | {"layers": list(stage.layers)} for stage in self.stages],
            "ranks": [{"bubble": b, "micro_batches": m, "memory_bytes": n} for b, m, n in ranks],
        }


def predict(
    costs: Sequence[LayerCost],
    ranks: int,
    *,
    micro_batches: int = 4,
    schedule: str = "one_f_one_b",
    chunks: int = 1,
    recompute: bool = False,
    cut: Cut | None = None,
    limit_bytes: int | None = None,
    copies: float = 2.0,
    transfer_s: Callable[[int], float] = lambda n_bytes: 0.0,
) -> Plan:
    """Predict a Pipeline with these settings, with the best cut unless one is given.

    Args:
        costs: of each layer, for one micro-batch.
        ranks: the number of ranks that jointly hold the model.
        cut: into ranks * chunks stages; None for the best one. With one stage on each rank every rank has parameters
            in it.
        limit_bytes: the largest memory of a rank in the best cut.
        copies: the bytes of parameters, gradients and the optimiser's state for each byte of parameters.
        transfer_s: (bytes of a message) -> its seconds.

    Raises:
        ConfigError: the schedule refuses the numbers, or no cut keeps the limit.
    """
    table = schedules.create(schedule, ranks, micro_batches, chunks)
    if cut is None:
        memory = _memory(costs, table, chunks, copies, recompute)
        limit = None if limit_bytes is None else limit_bytes // chunks
        times = [cost.forward_s + cost.backward_s for cost in costs]
        boundaries = [cost.boundary_bytes for cost in costs]
        trained = [cost.parameter_bytes > 0 for cost in costs] if chunks == 1 else None
        cut = balance(times, ranks * chunks, memory, limit, boundaries, trained)
    stages = tuple(_stage(costs, cut, number, ranks) for number in range(cut.stages))

    def seconds(operation: Operation) -> float:
        stage = stages[operation.stage]
        recompute_s = stage.forward_s if recompute else 0.0
        return {
            "F": stage.forward_s,
            "B": stage.backward_s + recompute_s,
            "I": stage.inputs_s + recompute_s,
            "W": stage.backward_s - stage.inputs_s,
        }[operation.kind]

    def message_s(operation: Operation) -> float:
        stage = stages[operation.stage]
        return transfer_s(stage.sent_bytes if operation.kind == "F" else stage.received_bytes)

    timing = schedules.simulate(table, seconds, message_s)
    equal = schedules.simulate(table, EQUAL)
    activation_bytes = [_kept_bytes(operations, stages, recompute) for operations in table]
    state_bytes = [sum(round(s.parameter_bytes * copies) for s in stages if s.rank == rank) for rank in range(ranks)]
    return Plan(
        schedule, table, cut, stages, timing, equal.bubble, tuple(a + b for a, b in zip(state_bytes, activation_bytes))
    )


def compare(costs: Sequence[LayerCost], ranks: int, **settings: Any) -> list[Plan]:
    """Predict pipelines by all schedules, with one stage and with two on each rank; `settings` are for `predict`."""
    plans: list[Plan] = []
    for schedule in schedules.available():
        for chunks in (1, 2):
            with suppress(ConfigError):  # two stages on a rank are refused, there are too few layers...
                plan = predict(costs, ranks, schedule=schedule, chunks=chunks, **settings)
                plans = [*(other for other in plans if other.table != plan.table), plan]
    return plans


def measured_cut(comm: Communicator, costs: Callable[[], Sequence[LayerCost]], ranks: int, **settings: Any) -> Cut:
    """Collective. Return the best cut by costs that rank 0 measures, the same on all ranks.

    Args:
        costs: measures; called on rank 0 only.
        ranks, settings: as for `predict`.
    """
    sizes = comm.raise_on_all_ranks(lambda: predict(costs(), ranks, **settings).cut.sizes if comm.rank == 0 else ())
    agreed = comm.gather(list(sizes))[0]
    return by_hand(agreed, sum(agreed))


def _stage(costs: Sequence[LayerCost], cut: Cut, number: int, ranks: int) -> StageCost:
    """Return a stage's cost: the sums over its layers, and the bytes at its two boundaries."""
    layers = cut.layers(number)
    sums = {key: sum(getattr(costs[layer], key) for layer in layers) for key in _SUMMED}
    received = costs[layers[0] - 1].boundary_bytes if number else 0
    sent = costs[layers[-1]].boundary_bytes if number < cut.stages - 1 else 0
    return StageCost(number, number % ranks, layers, **sums, received_bytes=received, sent_bytes=sent)


def _kept_bytes(operations: Sequence[Operation], stages: Sequence[StageCost], recompute: bool) -> int:
    """Return the peak of a rank's activations, in bytes; with recomputation: of inputs and recomputed activations."""
    if not recompute:
        return peak(operations, lambda stage: stages[stage].received_bytes + stages[stage].activation_bytes)
    recomputed = peak(operations, lambda stage: stages[stage].activation_bytes, recomputed=True)
    return peak(operations, lambda stage: stages[stage].received_bytes) + recomputed


def _memory(
    costs: Sequence[LayerCost], table: Table, chunks: int, copies: float, recompute: bool
) -> Callable[[int, range], int]:
    """Return a function (stage, layers) -> bytes, which counts the micro-batches that the schedule keeps in a stage."""
    received = [0, *(cost.boundary_bytes for cost in costs)]  # by the stage's first layer; the others are prefix sums
    parameters = [0, *accumulate(cost.parameter_bytes * copies for cost in costs)]
    activations = [0, *accumulate(cost.activation_bytes for cost in costs)]
    ranks = len(table)
    of_stages = [[op for op in table[stage % ranks] if op.stage == stage] for stage in range(ranks * chunks)]
    kept_inputs = [peak(operations) for operations in of_stages]
    kept_activations = [peak(operations, recomputed=recompute) for operations in of_stages]

    def of_stage(stage: int, layers: range) -> int:
        first, end = layers.start, layers.stop
        kept = kept_inputs[stage] * received[first] + kept_activations[stage] * (activations[end] - activations[first])
        return round(parameters[end] - parameters[first]) + kept

    return of_stage
