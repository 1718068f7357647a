"""1-bit Adam: after warm-up steps of Adam its momentum is exchanged, in one bit per element."""

from __future__ import annotations

from typing import final

import torch
from pydantic import Field

from hpcdist.compress import CompressionConfig, spans
from hpcdist.compress.coding.two_way import TwoWayMean
from hpcdist.strategies.synchronous.adam import AdamStep


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
    for each parameter and rank; and 32 of agreement. Memory: m, v, what is sent, what was not sent, and a second part
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
        compression: CompressionConfig = Field(
            CompressionConfig(name="ef_signsgd"), description="how momentum is compressed, both ways; none: it is not"
        )

    config: Config

    def __init__(self, config: Config, comm, model, **kwargs):
        super().__init__(config, comm, model, **kwargs)
        self._mean = TwoWayMean(self.calls.comm, config.compression, model.params, spans(model))
        self.state.two_way("mean", self._mean)

    def move_all(self) -> None:
        grads = self.model.grads
        if self.updates < self.config.warmup_steps:
            self.average(grads)
            for one in self.trained(grads):
                self.take_in(one, one.views[0], squares=True)
        else:
            sent = [torch.zeros_like(grad) for grad in grads]
            for one in self.trained(grads, sent):
                self.take_in(one, one.views[0], squares=False)
                one.views[1].copy_(self.moments(one.parameter)[0])
            self._mean(sent, self.model.gradients.present())
            for one in self.trained(sent):
                self.moments(one.parameter)[0].copy_(self.still(one, one.views[0]))
        for one in self.trained():
            self.step_along(one, self.direction(one))
