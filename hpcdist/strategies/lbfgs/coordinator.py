"""Coordinate the workers: assign the portions of every evaluation, and continue the step when all results are there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.lbfgs import vectors as ops
from hpcdist.strategies.lbfgs.algorithm import Lbfgs, Steps
from hpcdist.strategies.lbfgs.portions import Division, JointBatch, Pace, Portions, divide
from hpcdist.strategies.lbfgs.vectors import RemoteVectors, SharedPoint

COORDINATOR = 0


@dataclass(frozen=True)
class LbfgsRoles:
    """The ranks of each role; rank 0 coordinates."""

    shards: tuple[int, ...]
    workers: tuple[int, ...]


def assign_lbfgs(size: int, servers: int) -> LbfgsRoles:
    """Assign roles to `size` ranks. One rank has all roles; of two ranks the first is coordinator and shard.

    Raises:
        ConfigError: no rank is left to be a worker.
    """
    if size <= 2:
        return LbfgsRoles((COORDINATOR,), (size - 1,))
    if servers + 1 >= size:
        raise ConfigError(
            f"strategy.servers must leave a rank for the coordinator and at least one to be a worker; got {servers} on "
            f"{size} ranks. Start more ranks, or use fewer servers."
        )
    return LbfgsRoles(tuple(range(1, servers + 1)), tuple(range(servers + 1, size)))


WORK, DONE = range(2)  # replies to workers


@dataclass
class LossEvaluation:
    """An evaluation of the loss for a step: its portions, and their weighted losses, 0 before they are computed."""

    steps: Steps
    division: Division
    portions: Portions
    losses: list[float]


class Coordinator:
    """Assigns the portions of the algorithm's evaluations to workers.

    It does not communicate: `receive` takes a worker's message, and `take_replies` returns replies of three numbers:
    WORK, evaluation, portion; or DONE, the step's loss, and the last evaluation if it was at the new point, else 0.

    Args:
        count: number of portions of a batch.
        vectors: on the shards, which sum the gradients of an evaluation.
        report: receives a number of completed steps, and the text of an event or None.

    Attributes:
        clock: number of completed steps.
        evaluations: number of evaluations of the loss so far; the current one has this number.
    """

    def __init__(self, algorithm: Lbfgs, vectors: RemoteVectors, count: int, report: Callable[[int, str | None], None]):
        self._algorithm, self._vectors, self._count, self._report = algorithm, vectors, count, report
        self.clock = self.evaluations = 0
        self._batch = JointBatch(1)
        self._in_flight: LossEvaluation | None = None  # the current one; None between steps
        self._pace = Pace()
        self._idle: dict[int, int] = {}  # waiting workers, with the number of steps they have completed
        self._done: list[float] = [DONE, 0.0, 0.0]

    def receive(
        self, now: float, worker: int, clock: float, evaluation: float, portion: float, loss: float, *batch: float
    ) -> None:
        """Take a message of an idle worker, with the loss of a portion that it has computed; `evaluation` = 0: none.

        Args:
            now: the time, in seconds.
            clock: number of steps that the worker has completed.
            batch: the fields of the step's `JointBatch`.
        """
        self._idle[worker] = int(clock)
        self._pace.end(worker, now)
        if self._in_flight is None and clock == self.clock:
            samples, head, tail, whole = map(int, batch)
            self._batch = JointBatch(samples, head=head, tail=tail, whole=bool(whole))
            self._continue(self._algorithm.step(self._batch, self.clock + 1), None)
        latest, index = self._in_flight, int(portion)
        if latest is None or not evaluation or evaluation != self.evaluations or not latest.portions.take(index):
            return  # no result, an old one, or one that another worker has sent before
        latest.losses[index] = loss * latest.division.weight(index)
        if latest.portions.is_complete:
            self._continue(
                latest.steps, math.fsum(latest.losses) if all(map(math.isfinite, latest.losses)) else math.nan
            )

    def patience_s(self, now: float) -> float | None:
        """Return the seconds after which to call `take_replies` without a new message; None: never."""
        if not self._idle or self._in_flight is None:
            return None
        due = self._pace.due(now).values()
        return min(due) - now if due else None  # all computing workers are late: wait for a message

    def take_replies(self, now: float) -> list[tuple[int, list[float]]]:
        """Return replies to idle workers that get a portion, or whose step is done."""
        replies: list[tuple[int, list[float]]] = []
        portions = None if self._in_flight is None else self._in_flight.portions
        for worker, clock in sorted(self._idle.items(), key=lambda item: self._pace.mean_s(item[0])):
            if clock < self.clock:
                replies.append((worker, [*self._done]))
            elif portions is not None and (portion := portions.give(worker, now)) is not None:
                replies.append((worker, [WORK, self.evaluations, portion]))
            else:
                continue
            del self._idle[worker]
        return replies

    def forget(self, workers: Iterable[int]) -> None:
        """Remove workers that have failed, and reassign their portions."""
        for worker in workers:
            self._idle.pop(worker, None)
        self._pace.forget(workers)
        if self._in_flight is not None:
            self._in_flight.portions.forget(workers)

    def _continue(self, steps: Steps, loss: float | None) -> None:
        """Continue the step with an evaluation's loss, or start it (None), up to the next evaluation or its end."""
        try:
            next(steps) if loss is None else steps.send(loss)
        except StopIteration as end:
            self._in_flight = None
            self.clock += 1
            self._done = [DONE, end.value.loss, 0 if end.value.returned else self.evaluations]
            self._report(1, end.value.event)
            return
        division = divide(self._batch, self._count)
        self.evaluations += 1
        self._vectors.queue(ops.GATHER, self.evaluations, division.count, division.heads, division.tails)
        self._vectors.flush()
        portions = Portions(division.count, self._pace)
        self._in_flight = LossEvaluation(steps, division, portions, [0.0] * division.count)

    def start(self) -> None:
        """Start a period of service."""
        self._algorithm.load_model()

    def finish(self) -> None:
        """End a period of service."""
        self._vectors.copy(ops.POINT, ops.X)
        self._vectors.queue(ops.FINISH)
        self._vectors.flush()

    def state_dict(self) -> dict[str, Any]:
        return {"clock": self.clock, **self._algorithm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.clock = state["clock"]
        self._algorithm.load_state_dict(state)


Closure = Callable[[slice], Any]  # runs the backward pass of a portion, and returns its mean loss


class PortionWorker:
    """Fetch the point, compute a portion's loss and gradient there, push them, and ask for the next portion.

    Args:
        count: number of portions of a batch.
        seed: seed of dropout and other random layers: a portion has the same random numbers in all evaluations of a
            step and on all workers, so that the loss is one function.
        push: sends (evaluation, portion, weight) and the model's gradients to all shards; returns once they are added.
        ask: sends a message to the coordinator, and returns its reply, see `Coordinator`.

    Attributes:
        clock: number of completed steps.
    """

    def __init__(
        self, comm: Communicator, model: FlatModel, point: SharedPoint, count: int, seed: int,
        push: Callable[[int, int, float], None], ask: Callable[[Sequence[float]], list[float]],
    ):  # fmt: skip
        self._comm, self._model, self._shared, self._count, self._seed = comm, model, point, count, seed
        self._push, self._ask = push, ask
        self._devices = {flat.device for flat in model.params if flat.is_cuda}
        self.clock = 0
        self._point = 0  # the evaluation whose point is in the model

    def step(self, closure: Closure, batch: JointBatch) -> float:
        """Compute portions of a batch until the step is complete; return the loss at its start."""
        division = divide(batch, self._count)
        numbers = [batch.samples, batch.head, batch.tail, batch.whole]
        report: list[float] = [0, 0, 0.0]  # the last result: evaluation (0: none), portion, loss
        while True:
            kind, *reply = self._ask([self.clock, *report, *numbers])
            if kind == DONE:
                loss, evaluation = reply
                self.clock += 1  # even if the coordinator has completed later steps: it replies DONE to each
                self.fetch(int(evaluation))
                return loss
            evaluation, index = map(int, reply)
            self.fetch(evaluation)
            loss = self._compute(closure, division.portion(index), index)
            self._push(evaluation, index, division.weight(index))
            report = [evaluation, index, loss]

    def fetch(self, evaluation: int) -> None:
        """Copy an evaluation's point into the model, unless it is there already; 0: always copy."""
        if not evaluation or evaluation != self._point:
            self._shared.fetch(self._model.params)
            self._point = evaluation

    def _compute(self, closure: Closure, portion: slice, index: int) -> float:
        """Leave the gradients of a portion in the model; return its loss."""
        for slot in self._model.slots:
            slot.tensor.grad = None
        with torch.enable_grad(), self._comm.trace.span("portion", "compute", samples=portion.stop - portion.start):
            with torch.random.fork_rng(self._devices):
                torch.manual_seed(hash((self._seed, self.clock, index)) % 2**63)  # of integers: equal in all processes
                loss = torch.as_tensor(closure(portion), dtype=torch.float64).item()
        self._model.gradients.collect()
        return loss
