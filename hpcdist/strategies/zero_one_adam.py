"""0/1 Adam: average full gradients at fewer and fewer steps, else one bit per element; later take local steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, final

import torch

from hpcdist.comm.communicator import Communicator
from hpcdist.compress import TwoWayMean, spans
from hpcdist.config.settings import Field
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.common.state import copy_all, zero_all
from hpcdist.strategies.synchronous.adam import AdamStep, zero_untrained
from hpcdist.strategies.synchronous.own_step import rate_of


@final
class ZeroOneAdam(AdamStep):
    """Train by Adam with full gradient averages at fewer and fewer steps, one-bit averages at the others, then locally.

    Phase 1, the first `variance_steps` steps: at each kᵗʰ step full gradients are averaged, and update m and v; at the
    other steps C(g), their compressed mean as in `onebit_adam`, updates m only. k starts at 1 and doubles after each
    `full_steps` full steps. All ranks take the same step, θ ← θ − η(m/(√v + ε) + λθ).

    Phase 2: v is constant, and each rank takes local steps with its m. At every lᵗʰ step ranks exchange u, the sum
    of their moves times √v + ε: z = C(u), θ ← x + z/(√v + ε), where x are the parameters after the last exchange, with
    decay; m ← −z/Ση, if Ση is positive. l doubles every `local_steps` steps, up to `most_local`. Phase 2 starts with
    zero residuals.

    β₁, β₂, ε, η and λ are those of the local optimiser, as in `onebit_adam`; there is no bias correction. All ranks
    have the same weight, even with fewer samples. In phase 1 and after each exchange replicas are bitwise equal;
    evaluations use their mean. On one rank the optimiser steps as usual.

    Bytes per rank of n bytes of float32 gradients: at a full step 2n(p − 1)/p; at a compressed step and at an exchange
    1/32 of that and 8 for each parameter and rank; at the others nothing; in phase 1 32 bytes of agreement, at an
    exchange 24 for each parameter. Memory: m, v, √v + ε, u, x, the residual, and 1/p of a second residual.

    Example:
        >>> adam = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = hd.DistributedOptimizer(adam, model, "zero_one_adam")

    Reference: Yucheng Lu, Conglong Li, Minjia Zhang, Christopher De Sa, Yuxiong He, "Maximizing communication
    efficiency for large-scale training via 0/1 Adam", 2022.
    """

    class Config(AdamStep.Config):
        variance_steps: int = Field(1000, "steps after which v is frozen, and steps are local", ge=1)
        full_steps: int = Field(16, "κ: full steps after which their interval doubles", ge=1)
        local_steps: int = Field(32_768, "steps after which the interval of exchanges doubles", ge=1)
        most_local: int = Field(16, "largest number of steps between exchanges", ge=1)

        def local(self, step: int) -> bool:
            """Return whether a step, counted from 1, is in phase 2."""
            return step > self.variance_steps

        def synchronizes(self, step: int) -> bool:
            doublings = min(64, max(0, step - self.variance_steps - 1) // self.local_steps)
            return not self.local(step) or step % min(self.most_local, 2**doublings) == 0

    config: Config
    contract = replace(AdamStep.contract, averages="parameters")

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        model.keep_gradients([torch.zeros_like(flat) for flat in model.params])  # the first phase averages them
        self._mean = TwoWayMean(self.calls.comm, config.compression, model.params, spans(model))
        state = self.state
        state.two_way("mean", self._mean, resets=True)
        self.distance = state.value("distance", 1, self, reshard="first")  # k: steps from one full step to the next
        self.full = state.value("full", 0, self, reshard="first")  # number of full steps since k doubled
        self._common = state.sharded("common", model.params, start="parameters", resets=True)  # x
        self._moves = state.sharded("moves", model.params, resets=True)  # u, divided by √v + ε
        self.rates: dict[str, float] = state.value("rates", {}, self, resets=True)  # Ση by parameter since an exchange
        self.decays: dict[str, float] = state.value("decays", {}, self, resets=True)  # Π(1 − ηλ) since then

    # --- the first phase ------------------------------------------------------------------------------------------
    def move_all(self) -> None:
        flats, step = self.model.grads, self.steps + 1
        full = step % self.distance == 0
        if full:
            self.average(flats)
        else:
            self._mean(flats, self.model.gradients.present())
        runs = self.runs()
        for run in runs:
            self.update_moments(run, flats, squares=full)
        self.scale(runs)
        for run in runs:
            self.step_along(run)
        self.full += full
        if self.full == self.config.full_steps:
            self.distance, self.full = 2 * self.distance, 0

    # --- the second phase -----------------------------------------------------------------------------------------
    def advance(self, update: Update) -> Outcome:
        step = self.steps + 1
        if not self.config.local(step) or self.comm.size == 1:
            return super().advance(update)
        if not self.config.local(step - 1):
            self.state.reset()  # residuals of the first phase are dropped
        self.require_optimizer()
        outcome = self.gradients.step_alone(lambda: self.hooked(self._step_alone))
        self._count()
        if self.config.synchronizes(step):
            with torch.no_grad():
                self._exchange()
        return outcome

    def _step_alone(self) -> None:
        runs = self.runs()
        self.scale(runs)
        for run in runs:
            self.update_moments(run, self.model.grads, squares=False)
            self.step_along(run, self._moves)

    def _count(self) -> None:
        """Count a step's rate and decay of each parameter that has a gradient here."""
        for item in self.trained():
            rate = rate_of(item.group)
            self.rates[item.name] = self.rates.get(item.name, 0.0) + rate
            self.decays[item.name] = self.decays.get(item.name, 1.0) * (1 - rate * float(item.group["weight_decay"]))

    def _agree(self) -> list[bool]:
        """Collective. Average each parameter's rate and decay over the ranks that updated it; return which any did."""
        names = [slot.name for slot in self.model.slots]
        rows = [[float(name in self.rates), self.rates.get(name, 0.0), self.decays.get(name, 0.0)] for name in names]
        sums = torch.tensor(rows, dtype=torch.float64)
        self.comm.allreduce(sums.view(-1))
        stepped = {name: row for name, row in zip(names, sums.tolist(), strict=True) if row[0]}
        self.rates = {name: rate / count for name, (count, rate, _) in stepped.items()}
        self.decays = {name: decay / count for name, (count, _, decay) in stepped.items()}
        return [name in stepped for name in names]

    def _exchange(self) -> None:
        """Collective. Set the parameters to the common ones, moved by the mean of all ranks' moves."""
        used = self._agree()
        runs = self.runs(used, lambda name: (self.rates.get(name), self.decays.get(name)))
        self.scale(runs)
        for run in runs:
            for moves, scale in run.chunks(self._moves, self.scales):
                moves.mul_(scale)
        self._mean(self._moves, used)
        for run in runs:
            rate, decay = self.rates[run.name], self.decays[run.name]
            flats = self._moves, self._common, self.model.params, self.m, self.v, self.scales
            for received, x, parameter, m, v, scale in run.chunks(*flats):
                zero_untrained(received, v)
                if rate:
                    torch.div(received, -rate, out=m)
                parameter.copy_(x.mul_(decay).add_(received.div_(scale)))
        if not all(used):  # parameters that no rank updated: keep what the loop has set
            copy_all(self._common, self.model.params)
        zero_all(self._moves)
        self.rates, self.decays = {}, {}
