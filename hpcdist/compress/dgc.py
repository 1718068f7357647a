"""Deep gradient compression: top-k of accumulated velocities rather than of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from hpcdist.compress.base import Span
from hpcdist.compress.coding.elements import mean
from hpcdist.compress.topk import Largest
from hpcdist.config.settings import Field

_FIRST_RATIO = 0.25  # of the warm-up, as in the paper


@final
class Dgc(Largest):
    """Accumulate gradients g with momentum m, and send the largest sums: u ← m·u + g, v ← v + u, top-k of v.

    With `nesterov` v ← v + g + m·u. When an element is sent, its v becomes 0 (except the rounding error) and its u too
    (momentum factor masking), so that delayed gradients have no momentum; `masking = false` keeps u. The compressor
    applies momentum: use a local optimiser without momentum, such as plain SGD.

    Uncompressed steps, such as the first `warmup_steps`, keep u, because no gradient is delayed: they equal SGD with
    momentum (equation 1 of the paper).

    Bytes: 4 + k(v + H/8), as in top-k; in the first `ramp_steps` compressed steps k falls exponentially from a quarter
    of the elements. Memory: one more tensor than top-k. Error: as top-k of v; Σ messages + v = Σ u.

    Example:
        >>> options = {"name": "dgc", "ratio": 0.001, "ramp_steps": 100}
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "allreduce", compression=options)

    Reference: Yujun Lin, Song Han, Huizi Mao, Yu Wang, William Dally, "Deep gradient compression: reducing the
    communication bandwidth for distributed training", 2018, algorithm 4 and section 3; Nesterov's form is from the
    authors' code.
    """

    class Config(Largest.Config):
        ratio: float = Field(0.001, "part of the elements to send", gt=0, le=1)
        momentum: float = Field(0.9, "momentum: factor of a velocity from step to step", ge=0, lt=1)
        nesterov: bool = Field(False, "Nesterov's momentum: velocities are added one step ahead")
        masking: bool = Field(True, "set velocities of sent elements to 0 (momentum factor masking)")
        ramp_steps: int = Field(0, "steps in which the ratio falls from 0.25; a larger ratio stays", ge=0)
        clip_norm: float | None = Field(
            None, "largest norm of a rank's gradient, or of its part for a server", gt=0, allow_inf_nan=True
        )

    config: Config
    remembers = ("drawn", "steps", "velocity")
    elementwise = ("velocity",)

    def __init__(self, config: Config, count: int, spans: Sequence[Span] = ()):
        super().__init__(config, count, spans)
        self.velocity: Tensor | None = None  # created by the first gradient, with its dtype
        self.steps = 0

    def accumulate(self, residual: Tensor, tensor: Tensor) -> None:
        momentum, scale = self.config.momentum, self._scale(tensor)
        velocity = self._velocity_like(residual).mul_(momentum).add_(tensor, alpha=scale)
        if self.config.nesterov:
            residual.add_(tensor, alpha=scale).add_(velocity, alpha=momentum)
        else:
            residual.add_(velocity)

    def _scale(self, gradient: Tensor) -> float:
        """Return the factor that clips a gradient to `clip_norm`."""
        if self.config.clip_norm is None:
            return 1.0
        rms = mean(gradient, 2)  # the norm itself might not be finite
        return min(1.0, self.config.clip_norm / rms / math.sqrt(gradient.numel())) if rms else 1.0

    def encode_residual_(self, tensor: Tensor) -> Tensor:
        message, indices = self._encode_(tensor.numpy(), self._ratio())
        if self.config.masking:
            self._velocity_like(tensor).numpy()[indices] = 0
        self.steps += 1
        return message

    def _ratio(self) -> float:
        ratio, ramp = self.config.ratio, self.config.ramp_steps
        if self.steps >= ramp or ratio >= _FIRST_RATIO:
            return ratio
        return _FIRST_RATIO * (ratio / _FIRST_RATIO) ** (self.steps / ramp)

    def _velocity_like(self, tensor: Tensor) -> Tensor:
        if self.velocity is None:
            self.velocity = torch.zeros_like(tensor)
        return self.velocity
