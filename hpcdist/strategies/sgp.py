"""Average over directed graphs by push-sum, with a weight per rank: stochastic gradient push."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.config.settings import Field, Named
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Contract, Outcome, Strategy, Update
from hpcdist.strategies.common.state import Flats
from hpcdist.strategies.decentralised.mixing import Mixing
from hpcdist.strategies.decentralised.peers import Wire, WireConfig
from hpcdist.topology import load, make_topology


@final
class SGP(Strategy):
    """Train by stochastic gradient push, synchronously: x ← P(x − η g(z)), w ← Pw, z = x/w, over any topology.

    P is column-stochastic: a rank distributes its whole x and w, so Σx and Σw are conserved on every graph. The model
    holds z, which converges to the true mean even where x does not. The local optimiser steps on z, and x changes by
    the same step; gradient and weight decay are computed at z. If P is doubly stochastic, w stays 1 and x equals z, so
    that x and w are neither stored nor sent. The consensus is Σx/p.

    With `overlap` messages are sent while the next gradient is computed, and added one step later: x ← Px − η g(z),
    with z from before the step. A change of parameters between steps must then be part of the optimiser's step.

    Bytes per rank and step: one parameter vector to each destination, half with fp16 or bf16, and 8 bytes for w.
    Memory: one parameter vector per source, and x. With `overlap` one more exchange after the last step of a run,
    unused.

    Example on 4 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "sgp", topology="one_peer_exponential", overlap=True)

    Reference: Mahmoud Assran, Nicolas Loizou, Nicolas Ballas, Mike Rabbat, "Stochastic gradient push for distributed
    deep learning", 2019, algorithm 1; with `overlap` algorithm 2 for τ = 1.
    """

    class Config(WireConfig):
        topology: Named = Field(
            Named(name="one_peer_exponential"), "directed graph of messages, see `hpcdist topology`"
        )
        overlap: bool = Field(False, "receive messages one step later, while the next gradient is computed")

        def narrow(self, contract: Contract, size: int) -> Contract:
            unbiased = load(self.topology.name).doubly_stochastic  # else each step recomputes parameters from x
            return replace(
                contract,
                parameters="kept" if unbiased else "replaced",
                sends="between steps" if self.overlap else "within steps",
            )

    config: Config
    contract = Contract(averages="parameters", synchronizes="every step", consensus="elsewhere")

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        topology = make_topology(config.topology, comm)
        super().__init__(config, comm, model, **kwargs)
        self._mixing = self.opened(Mixing(comm, topology, overlap=config.overlap))
        self._biased = not topology.doubly_stochastic
        templates = model.params if self._biased else ()
        self._x = self.state.sharded("x", templates, start="parameters", resets=True)
        self._weight = self.state.value("weight", 1.0, self, "_weight", resets=True)
        self._wire = Wire(config.compression, model.params, self.state)
        self.state.parameters = lambda: Flats(self._x or model.params)
        self.state.before_load(self._mixing.drop)  # messages in flight have old parameters

    def _rounded(self) -> tuple[Tensor, ...]:
        """Return x and w as they are sent, rounded with half precision."""
        flats = self._wire.pack(self._x or self.model.params)
        return (*flats, torch.tensor([self._weight], dtype=torch.float64)) if self._biased else tuple(flats)

    def advance(self, update: Update) -> Outcome:
        if self.config.overlap:
            self._mix()
            outcome = self._descend(update)
            self._mixing.start(self._rounded(), self.steps + 1)
        else:
            outcome = self._descend(update)
            self._mix()
        return outcome

    def _mix(self) -> None:
        """Collective. Mix and debias: x ← Px, w ← Pw, z ← x/w."""
        if not self._mixing.in_flight:  # without overlap, or at the first step
            self._mixing.start(self._rounded(), self.steps)
        weight = torch.tensor([self._weight], dtype=torch.float64)
        self._mixing.finish((*self._x, weight) if self._biased else self.model.params)
        self._weight = weight.item()
        self._debias()

    def _debias(self) -> None:
        # z ← x/w
        if self._biased:
            for x, z in zip(self._x, self.model.params, strict=True):
                torch.div(x, self._weight, out=z)

    def _descend(self, update: Update) -> Outcome:
        """Run the local optimiser on z, and apply the same change to x."""
        if not self._biased:
            return self.gradients.step_alone(update)
        for x, z in zip(self._x, self.model.params, strict=True):
            x.sub_(z)  # and add the new z
        outcome = self.gradients.step_alone(update)
        for x, z in zip(self._x, self.model.params, strict=True):
            x.add_(z)
        self._debias()
        return outcome

    def pause(self) -> None:
        """Collective. Drop the exchange in flight; the next epoch starts with it."""
        self._mixing.drop()
