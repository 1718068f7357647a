"""Elastic averaging SGD with Nesterov momentum on each worker; momentum is not exchanged: EAMSGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from pydantic import Field
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Update
from hpcdist.strategies.common.state import State
from hpcdist.strategies.server.elastic import ElasticConfig, Motion, tie_to_centre
from hpcdist.strategies.server.strategy import ServerStrategy


class Nesterov(Motion):
    """Motion by the local optimiser's step and δ times the last velocity; the model holds x + δv."""

    def __init__(self, model: FlatModel, momentum: float, state: State):
        self._model, self._momentum = model, momentum
        self._velocity = state.sharded("velocity", model.params)  # 0 with another number of ranks

    def position(self) -> Sequence[Tensor]:
        pairs = zip(self._model.params, self._velocity, strict=True)
        return [torch.sub(params, velocity, alpha=self._momentum) for params, velocity in pairs]

    def step(self, update: Update) -> None:
        if not self._model.gradients.mean_weight:
            update()
            return
        with torch.no_grad(), self._model.skip_unused(self._model.gradients.present(), self._velocity):
            x, ahead = self.position(), [params.clone() for params in self._model.params]
            update()
            for params, velocity, old_x, before in zip(self._model.params, self._velocity, x, ahead, strict=True):
                velocity.mul_(self._momentum).add_(params - before)
                torch.add(old_x, velocity, alpha=1 + self._momentum, out=params)


@final
class EAMSGD(ServerStrategy):
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

    class Config(ElasticConfig):
        """Options of eamsgd."""

        momentum: float = Field(0.9, ge=0, lt=1, description="δ, Nesterov momentum of each worker; the paper has 0.99")

    up, down = "values", "moves"
    contract = replace(
        ServerStrategy.contract, averages="parameters", updates="here", parameters="kept", consensus="elsewhere"
    )
    steps_on_workers = True

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        tie_to_centre(self, config, lambda: Nesterov(model, config.momentum, self.state))
