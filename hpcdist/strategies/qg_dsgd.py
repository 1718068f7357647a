"""Quasi-global momentum: decentralised SGD whose momentum follows the averaged change of the parameters."""

from __future__ import annotations

from typing import Any, final

import torch

from hpcdist.comm.chunks import alongside
from hpcdist.comm.communicator import Communicator
from hpcdist.config.settings import Field, Named
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Contract, Outcome, Strategy, Update
from hpcdist.strategies.common.state import copy_all
from hpcdist.strategies.decentralised.mixing import Mixing, conserving, rates


@final
class QGDSGD(Strategy):
    """Train by decentralised SGD with quasi-global momentum, synchronously: x ← W(x − ηs), with SGD's step s.

    SGD steps by m = βm̂ + g, and s = m, or g + βm with Nesterov's momentum; but m̂ is not the last m: it follows the
    change of the parameters after averaging, m̂ ← μm̂ + (1 − μ)(xₜ − xₜ₊₁)/η, with μ = `memory`. So it contains the
    neighbours' steps, and momentum does not drive ranks with different data apart. β, Nesterov, η and the weight decay
    are read from the local optimiser, which must be torch's SGD. Without momentum this is `dpsgd` with the step before
    the average, to the bit. A step with learning rate 0 keeps m̂. The mean of all x follows the mean of the steps, to
    rounding.

    W must be doubly stochastic; it may be directed, and change between steps. On one rank SGD runs with its usual
    momentum.

    Bytes per rank and step: one parameter vector to each neighbour. Memory: m̂, x before the step, and, on several
    nodes, one vector per neighbour.

    Example on 4 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "qg_dsgd", topology="ring")

    Reference: Tao Lin, Sai Praneeth Karimireddy, Sebastian U. Stich, Martin Jaggi, "Quasi-global momentum: accelerating
    decentralized deep learning on heterogeneous data", 2021.
    """

    class Config(Strategy.Config):
        topology: Named = Field(Named(name="ring"), "graph of the neighbours, see `hpcdist topology`")
        memory: float = Field(0.9, "μ: part of the momentum that a step keeps", ge=0, lt=1)

    config: Config
    contract = Contract(averages="parameters", synchronizes="every step", optimizer="SGD")

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        topology = conserving(config.topology, comm, "qg_dsgd")
        super().__init__(config, comm, model, **kwargs)
        if self.optimizer is not None and comm.size > 1:
            self._sgd()
        self._mixing = self.opened(Mixing(comm, topology, overlap=False))
        model.move_params(self._mixing.share(model.params))
        like = model.params if comm.size > 1 else []
        self._momentum = self.state.sharded("momentum", like, reshard="mean", resets=True)  # m̂
        self._before = self.state.scratch([torch.empty_like(x) for x in like])  # x before the step

    def advance(self, update: Update) -> Outcome:
        if self.comm.size == 1:
            return self.gradients.step_alone(update)
        sgd = self._sgd()
        copy_all(self._before, self.model.params)
        outcome = self.gradients.step_alone(lambda: self._step(sgd, update))
        self._mixing.mix(self.model.params, self.steps)
        memory = self.config.memory
        with self.model.skip_unused(self.model.gradients.present(), self._momentum):
            for slot, rate in zip(self.model.slots, rates(self.model, sgd), strict=True):
                if rate:
                    flats = self._momentum, self._before, self.model.params
                    for momentum, before, x in alongside(*(slot.view(flat).view(-1) for flat in flats)):
                        momentum.mul_(memory).sub_(x - before, alpha=(1 - memory) / rate)
        return outcome

    def _step(self, local: torch.optim.Optimizer, update: Update) -> None:
        """Run SGD with a copy of m̂ as its momentum buffer."""
        buffered = {parameter for group in local.param_groups if group["momentum"] for parameter in group["params"]}
        for slot in self.model.slots:
            if slot.tensor in buffered:
                state: dict[str, Any] = local.state[slot.tensor]
                buffer, momentum = state.get("momentum_buffer"), slot.view(self._momentum)
                state["momentum_buffer"] = momentum.clone() if buffer is None else buffer.copy_(momentum)
        update()

    def _sgd(self) -> torch.optim.Optimizer:
        """Return the local optimiser; raise ConfigError unless it is torch's SGD without dampening."""
        optimizer = self.optimizer
        if isinstance(optimizer, torch.optim.SGD) and not any(group["dampening"] for group in optimizer.param_groups):
            return optimizer
        got = "none" if optimizer is None else type(optimizer).__name__
        raise ConfigError(
            f"the optimiser of qg_dsgd must be torch.optim.SGD without dampening; got {got}. Take SGD with momentum, "
            "or strategy d2 or gradient_tracking."
        )
