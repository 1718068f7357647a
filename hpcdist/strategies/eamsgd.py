"""Elastic averaging SGD whose workers step with Nesterov's momentum, which is never exchanged."""

from __future__ import annotations

from typing import final

import torch
from pydantic import Field

from hpcdist.strategies.base import Update
from hpcdist.strategies.families.elastic import Elastic


@final
class EAMSGD(Elastic):
    """`easgd` with Nesterov's momentum added to each worker's gradient: v ← δv + g, then a step along g + δv.

    With plain SGD as the optimiser this is, to the bit, `easgd` with SGD(momentum=δ, nesterov=True), whose x is the
    paper's point of look-ahead. Use an optimiser without momentum of its own. On one rank there is no centre and no
    momentum is added: the optimiser runs alone.

    Bytes per worker and exchange: one parameter vector each way.

    Reference: Sixin Zhang, Anna Choromanska, Yann LeCun, "Deep learning with elastic averaging SGD", 2015, algorithm 2.
    """

    class Config(Elastic.Config):
        """Options of eamsgd."""

        momentum: float = Field(0.9, ge=0, lt=1, description="δ of each worker's Nesterov momentum; 0.99 in the paper")

    def __init__(self, config: Config, comm, model):
        super().__init__(config, comm, model)
        adds = not self.alone and self.is_worker
        self._velocity = [torch.zeros_like(g) for g in model.grads] if adds else []

    def local_step(self, update: Update) -> None:
        momentum = self.config.momentum
        for velocity, grad in zip(self._velocity, self.model.grads):
            velocity.mul_(momentum).add_(grad)
            grad.add_(velocity, alpha=momentum)
        update()

    def state(self) -> dict:
        return {**super().state(), "velocity": self._velocity}

    def load_state(self, state: dict) -> None:
        super().load_state(state)
        for velocity, saved in zip(self._velocity, state.get("velocity", [])):
            velocity.copy_(saved)
