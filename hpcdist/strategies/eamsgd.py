"""Elastic averaging SGD with Nesterov momentum on each worker; momentum is not exchanged: EAMSGD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from hpcdist.config.settings import Field
from hpcdist.strategies.base import Update
from hpcdist.strategies.server.elastic import ElasticStrategy, ElasticWorker


class NesterovWorker(ElasticWorker):
    """Move by the local optimiser's step and δ times the last velocity; the model holds x + δv."""

    def __init__(self, strategy: EAMSGD):
        super().__init__(strategy)
        self._momentum = strategy.config.momentum
        self._velocity = strategy.state.sharded("velocity", self.model.params)  # 0 with another number of ranks

    def position(self) -> Sequence[Tensor]:
        pairs = zip(self.model.params, self._velocity, strict=True)
        return [torch.sub(params, velocity, alpha=self._momentum) for params, velocity in pairs]

    def move(self, update: Update) -> None:
        if not self.model.gradients.mean_weight:
            update()
            return
        with torch.no_grad(), self.model.skip_unused(self.model.gradients.present(), self._velocity):
            x, ahead = self.position(), [params.clone() for params in self.model.params]
            update()
            for params, velocity, old_x, before in zip(self.model.params, self._velocity, x, ahead, strict=True):
                velocity.mul_(self._momentum).add_(params - before)
                torch.add(old_x, velocity, alpha=1 + self._momentum, out=params)


@final
class EAMSGD(ElasticStrategy):
    """Add Nesterov's momentum to `easgd`: v ← δv − η g(x + δv), x ← x + v; the centre pulls at x.

    A worker's model holds the look-ahead point x + δv, where gradients are computed. −ηg is the step of the worker's
    optimiser from there, weight decay included; use an optimiser without momentum. Every `period` steps, as in `easgd`,
    worker and centre move by e = a(x − c), with x from before the step. On one rank only the optimiser runs, without
    momentum.

    Bytes per worker and exchange: one parameter vector in each direction. Memory: one more parameter vector on each
    worker.

    Example on 3 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "eamsgd", period=4, momentum=0.9)

    Reference: Sixin Zhang, Anna Choromanska, Yann LeCun, "Deep learning with elastic averaging SGD", 2015, algorithm 2.
    """

    class Config(ElasticStrategy.Config):
        momentum: float = Field(0.9, "δ, Nesterov momentum of each worker; the paper has 0.99", ge=0, lt=1)

    config: Config
    worker_type = NesterovWorker
