"""1-bit Adam: after warm-up steps of Adam its momentum is exchanged, in one bit per element."""

from __future__ import annotations

from typing import final

from pydantic import Field

from hpcdist.compress import spans
from hpcdist.compress.coding.two_way import TwoWayMean
from hpcdist.strategies.synchronous.adam import AdamStep, still


@final
class OneBitAdam(AdamStep):
    """Train by Adam on the mean gradient; after `warmup_steps` freeze v, and exchange m in one bit per element.

    In the warm-up gradients are averaged, m ← β₁m + (1 − β₁)g, v ← β₂v + (1 − β₂)g², θ ← θ − η(m/(√v + ε) + λθ).
    Afterwards v stays; each rank takes its own gradient into m, and all go on from C(m): the mean of the ranks' m,
    compressed on the way to the rank that averages a piece and on the way back, each time with what was not sent
    before. So the compression's error goes through a fixed v, and not through squares. There is no bias correction, as
    in the published code. The learning rate should be warmed up too. A bit has the size of the whole parameter's m, so
    elements whose v is tiny beside the others' jump: ε of 1e-4 rather than 1e-8 bounds that.

    β₁, β₂, ε, η and λ are those of the local optimiser, torch's AdamW, or Adam without decay, in whose `state` m and v
    lie; its own step is not run. Replicas are bitwise equal. On one rank, which sends nothing, the optimiser makes
    its own step. A warm-up of 15 to 20 % of all steps is usual. The compressor is ef_signsgd
    unless another is given; the published code multiplies signs by the root of the mean square, whose error may be
    larger than what is sent, and here it is the mean magnitude. none is exact.

    Bytes per rank and step of n bytes of float32 gradients: in the warm-up 2n(p − 1)/p, then a 32ⁿᵈ of that, and eight
    for each parameter and rank; and 32 of agreement. Memory: m, v, √v + ε, what was not sent, and a second part
    of that for a pᵗʰ.

    Example:
        >>> adam = torch.optim.Adam(model.parameters(), lr=1e-3)
        >>> optimizer = hd.DistributedOptimizer(adam, model, "onebit_adam", warmup_steps=2)

    Reference: Hanlin Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence
    speed", 2021.
    """

    class Config(AdamStep.Config):
        """Options of onebit_adam."""

        warmup_steps: int = Field(1000, ge=1, description="T: steps of Adam before v is frozen")

    config: Config

    def __init__(self, config: Config, comm, model, **kwargs):
        super().__init__(config, comm, model, **kwargs)
        self._mean = TwoWayMean(self.calls.comm, config.compression, model.params, spans(model))
        self.state.two_way("mean", self._mean)

    def move_all(self) -> None:
        grads, runs, present = self.model.grads, self.runs(), self.model.gradients.present()
        frozen = self.updates >= self.config.warmup_steps
        if not frozen:
            self.average(grads)
        for run in runs:
            self.take_in(run, grads, squares=not frozen)
        if frozen:
            with self.model.skip_unused(present, self.m):
                self._mean(self.m, present)
        self.scale(runs)
        for run in runs:
            for m, v in run.chunks(self.m, self.v) if frozen else ():
                still(m, v)
            self.step_along(run)
