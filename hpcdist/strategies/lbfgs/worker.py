"""Compute portions, one after the other, until a step is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hpcdist.comm.communicator import Communicator
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.lbfgs.coordinator import DONE
from hpcdist.strategies.lbfgs.memory import ShardMemory
from hpcdist.strategies.lbfgs.portions import JointBatch, divide

Closure = Callable[[slice], Any]  # runs the backward pass of a portion, and returns its mean loss


class PortionWorker:
    """Fetch the point, compute a portion's loss and gradient there, push these, and ask for the next.

    Args:
        count: into how many portions a batch is cut.
        seed: of the random numbers that a portion's forward pass draws: in every evaluation of a step the same, so
            that the loss is one function, whoever computes it.
        push: brings (evaluation, portion, weight) and the gradients in the model to all shards, which have counted them
            when it returns.
        ask: sends a message to the coordinator, and returns its reply.

    Attributes:
        clock: how many steps have been taken.
    """

    def __init__(
        self,
        comm: Communicator,
        model: FlatModel,
        memory: ShardMemory,
        count: int,
        seed: int,
        push: Callable[[int, int, float], None],
        ask: Callable[[Sequence[float]], list[float]],
    ):
        self._comm, self._model, self._memory, self._count, self._seed = comm, model, memory, count, seed
        self._push, self._ask = push, ask
        self._devices = {flat.device for flat in model.params if flat.is_cuda}
        self.clock = 0
        self._point = 0  # the evaluation whose point is in the model

    def step(self, closure: Closure, batch: JointBatch) -> float:
        """Compute portions of a batch until the step is done; return the loss at its beginning."""
        division = divide(batch, self._count)
        numbers = [batch.samples, batch.head, batch.tail, batch.whole]
        report: list[float] = [0, 0, 0.0]
        while True:
            kind, *reply = self._ask([self.clock, *report, *numbers])
            if kind == DONE:
                loss, evaluation = reply
                self.clock += 1  # others may be further: their next steps are done when this worker comes to them
                self.fetch(int(evaluation))
                return loss
            evaluation, index = map(int, reply)
            self.fetch(evaluation)
            loss = self._compute(closure, division.portion(index), index)
            self._push(evaluation, index, division.weight(index))
            report = [evaluation, index, loss]

    def fetch(self, evaluation: int) -> None:
        """Copy an evaluation's point into the model, unless it is there; 0 is one that never is."""
        if not evaluation or evaluation != self._point:
            self._memory.fetch(self._model.params)
            self._point = evaluation

    def _compute(self, closure: Closure, portion: slice, index: int) -> float:
        for parameter in self._model.parameters():
            parameter.grad = None
        with torch.enable_grad(), self._comm.span("portion", "compute", samples=portion.stop - portion.start):
            with torch.random.fork_rng(self._devices):
                torch.manual_seed(hash((self._seed, self.clock, index)) % 2**63)  # of whole numbers: alike everywhere
                loss = torch.as_tensor(closure(portion), dtype=torch.float64).item()
        self._model.collect()
        return loss
