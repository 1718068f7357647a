"""0/1 Adam: full gradients at ever fewer steps, one bit per element at the others; then local steps and exchanges."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch
from pydantic import Field

from hpcdist.compress import CompressionConfig, spans
from hpcdist.compress.coding.two_way import TwoWayMean
from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.common.state import copy_all, zero_all
from hpcdist.strategies.synchronous.adam import AdamStep
from hpcdist.strategies.synchronous.own_step import rate_of


@final
class ZeroOneAdam(AdamStep):
    """Train by Adam whose gradients are averaged in full at ever fewer steps, in one bit at the others, then seldom.

    In the first `variance_steps` steps: at each kᵗʰ step gradients are averaged in full and m and v follow; at the
    others m alone follows C(g), their mean compressed both ways as in `onebit_adam`. k begins at 1 and doubles after
    each `full_steps` full steps. All ranks make the same step, θ ← θ − η(m/(√v + ε) + λθ).

    Then v stays, and each rank makes local steps with its own m. Every lᵗʰ step ranks exchange u, the sum of their
    moves times √v + ε: z = C(u), θ ← x + z/(√v + ε), where x are the parameters of the exchange before, less their
    decay; m ← −z/Ση, where Ση is above 0. l doubles every `local_steps` steps, up to `most_local`. Errors of the first
    phase are forgotten at the second one's beginning.

    β₁, β₂, ε, η and λ are those of the local optimiser, as in `onebit_adam`; there is no bias correction. Every rank
    counts alike, also one that had fewer samples. In the first phase and after each exchange replicas are bitwise
    equal; evaluations use their mean. On one rank, which sends nothing, the optimiser makes its own step.

    Bytes per rank of n bytes of float32 gradients: at a full step 2n(p − 1)/p, at a compressed one and at an exchange a
    32ⁿᵈ of that and eight for each parameter and rank, at the others nothing; in the first phase 32 of agreement, at an
    exchange 24 for each parameter. At synchronizations 1, 2, 4, 8... and each 64th an all-reduce of 16 bytes compares
    settings.
    Memory: m, v, u, x, what was not sent, and a second part of that for a pᵗʰ.

    Example:
        >>> adam = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = hd.DistributedOptimizer(adam, model, "zero_one_adam")

    Reference: Yucheng Lu, Conglong Li, Minjia Zhang, Christopher De Sa, Yuxiong He, "Maximizing communication
    efficiency for large-scale training via 0/1 Adam", 2022.
    """

    class Config(AdamStep.Config):
        """Options of zero_one_adam."""

        variance_steps: int = Field(1000, ge=1, description="steps after which v is frozen, and steps are local")
        full_steps: int = Field(16, ge=1, description="κ: full steps after which their distance doubles")
        local_steps: int = Field(32_768, ge=1, description="steps after which the distance of exchanges doubles")
        most_local: int = Field(16, ge=1, description="most steps from exchange to exchange")
        compression: CompressionConfig = Field(
            CompressionConfig(name="ef_signsgd"), description="how means are compressed, both ways; none: they are not"
        )

        def local(self, step: int) -> bool:
            """Tell whether a step is of the second phase; counts from 1."""
            return step > self.variance_steps

        def synchronizes(self, step: int) -> bool:
            doublings = min(64, max(0, step - self.variance_steps - 1) // self.local_steps)
            return not self.local(step) or step % min(self.most_local, 2**doublings) == 0

    config: Config
    contract = replace(AdamStep.contract, averages="parameters")

    def __init__(self, config: Config, comm, model, **kwargs):
        super().__init__(config, comm, model, **kwargs)
        model.keep_gradients([torch.zeros_like(flat) for flat in model.params])  # which are averaged at first
        self._mean = TwoWayMean(self.calls.comm, config.compression, model.params, spans(model))
        state = self.state
        state.two_way("mean", self._mean, resets=True)
        self.distance = state.value("distance", 1, self, reshard="first")  # of full steps
        self.full = state.value("full", 0, self, reshard="first")  # how many since it has doubled
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
        for one in self.trained(flats):
            self.take_in(one, one.views[0], squares=full)
            self.step_along(one, self.direction(one))
        self.full += full
        if self.full == self.config.full_steps:
            self.distance, self.full = 2 * self.distance, 0

    # --- the second phase -----------------------------------------------------------------------------------------
    def advance(self, update: Update) -> Outcome:
        step = self.steps + 1
        if not self.config.local(step) or self.comm.size == 1:
            return super().advance(update)
        if not self.config.local(step - 1):
            self.state.reset()  # what was not sent in the first phase is forgotten
        self.require_optimizer()
        outcome = self.gradients.step_alone(lambda: self.hooked(self._step_alone))
        self._count()
        if self.config.synchronizes(step):
            with torch.no_grad():
                self._exchange()
        return outcome

    def _step_alone(self) -> None:
        for one in self.trained(self.model.grads, self._moves):
            gradient, moves = one.views
            self.take_in(one, gradient, squares=False)
            direction = self.direction(one)
            moves.sub_(direction, alpha=rate_of(one.group))
            self.step_along(one, direction)

    def _count(self) -> None:
        """Count a step's rate and decay of each parameter that has a gradient here."""
        for one in self.trained():
            rate = rate_of(one.group)
            self.rates[one.name] = self.rates.get(one.name, 0.0) + rate
            self.decays[one.name] = self.decays.get(one.name, 1.0) * (1 - rate * float(one.group["weight_decay"]))

    def _agree(self) -> list[bool]:
        """Collective. Average rates and decays over the ranks that have stepped; tell which parameters any has."""
        names = [slot.name for slot in self.model.slots]
        rows = [[float(name in self.rates), self.rates.get(name, 0.0), self.decays.get(name, 0.0)] for name in names]
        sums = torch.tensor(rows, dtype=torch.float64)
        self.comm.allreduce(sums.view(-1))
        found = {name: row for name, row in zip(names, sums.tolist(), strict=True) if row[0]}
        self.rates = {name: rate / count for name, (count, rate, _) in found.items()}
        self.decays = {name: decay / count for name, (count, _, decay) in found.items()}
        return [name in found for name in names]

    def _exchange(self) -> None:
        """Collective. Go on from the common parameters and the mean of all ranks' moves."""
        used = self._agree()
        for one in self.trained(self._moves, used=used):
            one.views[0].mul_(self.scale(one))
        self._mean(self._moves, used)
        for one in self.trained(self._moves, self._common, used=used):
            received, x = one.views
            self.still(one, received)
            if self.rates[one.name]:
                self.moments(one.parameter)[0].copy_(received / -self.rates[one.name])
            x.mul_(self.decays[one.name]).add_(received / self.scale(one))
            one.parameter.copy_(x)
        copy_all(self._common, self.model.params)
        zero_all(self._moves)
        self.rates, self.decays = {}, {}
