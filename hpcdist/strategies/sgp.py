"""Stochastic gradient push: averaging over directed graphs by push-sum, which keeps count of what was sent."""

from __future__ import annotations

from typing import final

import torch
from pydantic import Field
from torch import Tensor

from hpcdist.config import Named
from hpcdist.records import StepRecord
from hpcdist.strategies.base import Outcome, Strategy, Update, mean
from hpcdist.strategies.families.mixing import Mixing
from hpcdist.strategies.families.wire import Wire, WireConfig
from hpcdist.topology import choice


@final
class SGP(Strategy):
    """Stochastic gradient push: x ← P(x − η g(z)), w ← Pw, z = x/w, over any topology, on all ranks together.

    P is column-stochastic: every rank hands out all that it has, so Σx and Σw are conserved however uneven the graph,
    and z, which is what the model holds, goes to the true mean where x does not. The local optimiser steps on z, and
    the same change is made to x; the gradient and weight decay are those at z. Where P is doubly stochastic w stays 1
    and x is z: neither is kept or sent then. The ranks together stand for Σx/p.

    With `overlap` messages are on their way while the next gradient is computed, and added one step later: x ← Px − η
    g(z), with z of before. Whatever changes parameters between steps must then be part of the optimiser's step.

    Bytes per rank and step: one parameter vector to each rank sent to, half with fp16 or bf16, and 8 bytes for w.
    Memory: one parameter vector per rank received from, and x. With `overlap` one more exchange after the last step
    of a run, unused.

    Reference: Mahmoud Assran, Nicolas Loizou, Nicolas Ballas, Mike Rabbat, "Stochastic gradient push for distributed
    deep learning", 2019, algorithm 1; with `overlap` algorithm 2 for τ = 1.
    """

    class Config(WireConfig):
        """Options of sgp."""

        topology: Named = Field(
            Named(name="one_peer_exponential"), description="who sends to whom, see `hpcdist topology`"
        )
        overlap: bool = Field(False, description="messages arrive while the next gradient is computed, a step later")

    def __init__(self, config: Config, comm, model):
        found = choice.make(config.topology, comm)
        super().__init__(config, comm, model)
        self._mixing = Mixing(comm, found, overlap=config.overlap)
        self._biased = not found.doubly_stochastic
        self._x = model.copy_params() if self._biased else ()
        self._wire = Wire(config.compression, model.params)
        self._weight = torch.ones(1, dtype=torch.float64)

    @property
    def _pushed(self) -> tuple[Tensor, ...]:
        """What is sent, and mixed."""
        return (*self._x, self._weight) if self._biased else self.model.params

    def _rounded(self) -> tuple[Tensor, ...]:
        """The same as it travels."""
        flats = self._wire.pack(self._x or self.model.params)
        return (*flats, self._weight) if self._biased else tuple(flats)

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
        """Collective. x ← Px, w ← Pw, z ← x/w."""
        if not self._mixing.under_way:  # without overlap, or at the first step
            self._mixing.start(self._rounded(), self.steps)
        self._mixing.finish(self._pushed)
        self._debias()

    def _debias(self) -> None:
        if self._biased:
            for x, z in zip(self._x, self.model.params, strict=True):
                torch.div(x, self._weight.item(), out=z)

    def _descend(self, update: Update) -> Outcome:
        """The local optimiser's step on z, and the same change to x."""
        if not self._biased:
            return self.step_alone(update)
        for x, z in zip(self._x, self.model.params, strict=True):
            x.sub_(z)
        outcome = self.step_alone(update)
        for x, z in zip(self._x, self.model.params, strict=True):
            x.add_(z)
        self._debias()
        return outcome

    def join(self, update: Update) -> StepRecord:
        return self.step_without_samples(update)

    def consensus(self) -> tuple[list[Tensor], list[Tensor]]:
        """Collective. The mean of x, which messages conserve, and of the buffers."""
        return self._means(self._pushed[: len(self.model.params)]), self._means(self.model.buffers)

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def state(self) -> dict:
        x = [x.clone() for x in self._x] if self._biased else None
        return {**super().state(), "x": x, "weight": self._weight.item()}

    def adapted_state(self, states: list[dict]) -> dict:
        return {**states[0], "x": None, "weight": 1.0}

    def adapted_params(self, params: list[list[Tensor]], states: list[dict]) -> list[Tensor]:
        return mean([own if state["x"] is None else state["x"] for own, state in zip(params, states, strict=True)])

    def load_state(self, state: dict) -> None:
        super().load_state(state)
        self._mixing.drop()  # what was sent is not what was loaded
        if self._biased:
            for x, saved in zip(self._x, state["x"] or self.model.params, strict=True):
                x.copy_(saved)
            self._weight.fill_(state["weight"])

    def close(self) -> None:
        self._mixing.close()
