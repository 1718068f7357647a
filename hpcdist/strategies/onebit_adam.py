"""1-bit Adam: after warm-up steps of Adam its momentum is exchanged, in one bit per element."""

from __future__ import annotations

from typing import Any, final

from hpcdist.comm.communicator import Communicator
from hpcdist.compress import TwoWayMean, spans
from hpcdist.config.settings import Field
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.synchronous.adam import AdamStep, zero_untrained


@final
class OneBitAdam(AdamStep):
    """Train by Adam on the mean gradient; after `warmup_steps` freeze v, and exchange m in one bit per element.

    In the warm-up gradients are averaged, m ← β₁m + (1 − β₁)g, v ← β₂v + (1 − β₂)g², θ ← θ − η(m/(√v + ε) + λθ).
    Afterwards v is constant; each rank updates m with its local gradient, and all continue from C(m): the mean of the
    ranks' m, compressed with error feedback to the rank that averages a chunk, and again from there. So the error is
    divided by a fixed v, and never squared. There is no bias correction, as in the published code. The learning rate
    should be warmed up too. A bit represents the mean magnitude of the whole parameter's m, so elements with a very
    small v take large steps: ε of 1e-4 rather than 1e-8 bounds them.

    β₁, β₂, ε, η and λ are those of the local optimiser, torch's AdamW, or Adam without decay. Its `state` contains m
    and v; its step does not run. Replicas are bitwise equal. On one rank the optimiser steps as usual. A warm-up of
    15 to 20 % of all steps is usual. The default compressor is ef_signsgd, which multiplies signs by the mean
    magnitude; the published code uses the root mean square, whose error may exceed the message. none is exact.

    Bytes per rank and step of n bytes of float32 gradients: in the warm-up 2n(p − 1)/p, then 1/32 of that, and 8 for
    each parameter and rank; and 32 bytes of agreement. Memory: m, v, √v + ε, the residual, and 1/p of a second
    residual.

    Example:
        >>> adam = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = hd.DistributedOptimizer(adam, model, "onebit_adam", warmup_steps=2)

    Reference: Hanlin Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence
    speed", 2021.
    """

    class Config(AdamStep.Config):
        warmup_steps: int = Field(1000, "T: steps of Adam before v is frozen", ge=1)

    config: Config

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        self._mean = TwoWayMean(self.calls.comm, config.compression, model.params, spans(model))
        self.state.two_way("mean", self._mean)

    def move_all(self) -> None:
        grads, runs, present = self.model.grads, self.runs(), self.model.gradients.present()
        frozen = self.updates >= self.config.warmup_steps
        if not frozen:
            self.average(grads)
        for run in runs:
            self.update_moments(run, grads, squares=not frozen)
        if frozen:
            with self.model.skip_unused(present, self.m):
                self._mean(self.m, present)
        self.scale(runs)
        for run in runs:
            for m, v in run.chunks(self.m, self.v) if frozen else ():
                zero_untrained(m, v)
            self.step_along(run)
