"""D²: decentralised SGD with a correction, so that ranks with different data agree."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from hpcdist.comm.chunks import alongside
from hpcdist.comm.communicator import Communicator
from hpcdist.config.settings import Field, Named
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Contract, Outcome, Strategy, Update
from hpcdist.strategies.decentralised.mixing import Mixing, rates
from hpcdist.topology import make_topology

_LEAST = -1 / 3 + 1e-9  # eigenvalue of W


@final
class D2(Strategy):
    """Train by D², synchronously: x ← W(x + u + c), where c is the change by the last average.

    Here u is the local optimiser's step at x, and c = xₜ − (xₜ₋₁ + uₜ₋₁). With SGD this is the published rule, W(2xₜ −
    xₜ₋₁ − η(gₜ − gₜ₋₁)). In `dpsgd` each rank is pulled to the optimum of its data, and ranks with different data
    do not agree; here this pull cancels between two steps, and all ranks converge to the optimum of all data. When the
    learning rate changes, c is multiplied by ηₜ/ηₜ₋₁; after a rate of 0 it restarts from 0. The mean of all x follows
    the mean of the steps u, to rounding. Any local optimiser works; the paper uses SGD.

    W must be static, symmetric, doubly stochastic, and without eigenvalues of −1/3 or less, with which the rule
    diverges even without gradients. With `lazy`, the default, ranks mix by (W + I)/2, which has none; without it the
    ring of an even number of ranks is refused, for example. On one rank only the optimiser runs.

    Bytes per rank and step: one parameter vector to each neighbour. Memory: c, and, on several nodes, one vector per
    neighbour.

    Example on 4 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "d2", topology="ring")

    Reference: Hanlin Tang, Xiangru Lian, Ming Yan, Ce Zhang, Ji Liu, "D²: decentralized training over decentralized
    data", 2018.
    """

    class Config(Strategy.Config):
        topology: Named = Field(Named(name="ring"), "graph of the neighbours, see `hpcdist topology`")
        lazy: bool = Field(True, "mix by (W + I)/2, so that any symmetric graph will do")

    config: Config
    contract = Contract(averages="parameters", synchronizes="every step")

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        topology = make_topology(config.topology, comm)
        name = config.topology.name
        if not (topology.symmetric and topology.doubly_stochastic and topology.static):
            raise ConfigError(
                "strategy.topology of d2 must be symmetric, doubly stochastic, and the same at every step; got "
                f"{name}. Take ring, torus, complete or graph; or strategy gradient_tracking, which goes with others."
            )
        least = float(np.linalg.eigvalsh(topology.matrix())[0])
        if not config.lazy and least < _LEAST:
            raise ConfigError(
                f"strategy.topology of d2 must have no eigenvalue of −1/3 or less in W; got {name} of {comm.size} "
                f"ranks, with {least:.3f}. Set strategy.lazy = true, which mixes by (W + I)/2, or take another graph."
            )
        super().__init__(config, comm, model, **kwargs)
        self._mixing = self.opened(Mixing(comm, topology, overlap=False, identity_weight=0.5 if config.lazy else 0.0))
        model.move_params(self._mixing.share(model.params))
        self._changed = self.state.sharded("changed", model.params if comm.size > 1 else [], resets=True)  # c
        self.rates: list[float] = self.state.value("rates", [], self, resets=True)  # of each parameter's last step

    def advance(self, update: Update) -> Outcome:
        outcome = self.gradients.step_alone(update)
        if self.comm.size == 1:
            return outcome
        self._scale()
        for x, changed in zip(self.model.params, self._changed, strict=True):
            for mine, c in alongside(x, changed):
                c.sub_(mine.add_(c))  # −(x + u)
        self._mixing.mix(self.model.params, self.steps)
        for x, changed in zip(self.model.params, self._changed, strict=True):
            changed.add_(x)
        return outcome

    def _scale(self) -> None:
        """Multiply c by ηₜ/ηₜ₋₁; after a step with a rate of 0 set it to 0, as at the first step."""
        new_rates = rates(self.model, self.optimizer)
        if self.rates:
            for slot, rate, last_rate in zip(self.model.slots, new_rates, self.rates, strict=True):
                part = slot.view(self._changed)
                if not last_rate:
                    part.zero_()
                elif rate != last_rate:
                    part.mul_(rate / last_rate)
        self.rates = new_rates
