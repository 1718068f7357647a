"""Deep gradient compression: top-k of accumulated velocities rather than of gradients."""

from __future__ import annotations

from typing import final

import torch
from pydantic import Field
from torch import Tensor

from hpcdist.compress.largest import Largest

_FIRST_RATIO = 0.25  # of the warm-up, as in the paper


@final
class Dgc(Largest):
    """Momentum before compression: u ← m·u + g, v ← v + u; the largest elements of v are sent.

    Where elements are sent both v, but for what rounding took, and u become 0 (momentum factor masking), so that late
    gradients don't push on. The momentum is here: use a local optimiser without any, such as plain SGD. While
    `warmup_steps` lasts gradients are sent as they are, without momentum.

    Bytes: 4 + k(v + H/8), as in top-k; in the first `ramp_steps` steps k falls exponentially from a quarter of the
    elements. Memory: one tensor more than top-k. Error: that of top-k for v; Σ messages + v = Σ u.

    Reference: Yujun Lin, Song Han, Huizi Mao, Yu Wang, William Dally, "Deep gradient compression: reducing the
    communication bandwidth for distributed training", 2018, algorithm 4 and section 3.
    """

    class Config(Largest.Config):
        """Options of dgc."""

        ratio: float = Field(0.001, gt=0, le=1, description="part of the elements to send")
        momentum: float = Field(0.9, ge=0, lt=1, description="what velocities keep from step to step")
        ramp_steps: int = Field(0, ge=0, description="steps in which the ratio falls from 0.25, or stays if larger")
        clip_norm: float | None = Field(
            None, gt=0, description="largest norm of a rank's gradient, the paper's is 1/√p of the whole's; none: any"
        )

    def __init__(self, config: Config, count, spans=()):
        super().__init__(config, count, spans)
        self._velocity: Tensor | None = None  # made with the first gradient, in its type
        self._steps = 0

    def accumulate(self, residual: Tensor, tensor: Tensor) -> None:
        velocity = self._velocity_like(residual).mul_(self.config.momentum)
        scale = 1.0
        if self.config.clip_norm is not None:
            norm = torch.linalg.vector_norm(tensor, dtype=residual.dtype).item()
            scale = min(1.0, self.config.clip_norm / norm) if norm else 1.0
        velocity.add_(tensor, alpha=scale)
        residual.add_(velocity)

    def take(self, tensor: Tensor) -> Tensor:
        message, found = self._take(tensor.numpy(), self._ratio())
        self._velocity_like(tensor).numpy()[found] = 0
        self._steps += 1
        return message

    def _ratio(self) -> float:
        ratio, ramp = self.config.ratio, self.config.ramp_steps
        if self._steps >= ramp or ratio >= _FIRST_RATIO:
            return ratio
        return _FIRST_RATIO * (ratio / _FIRST_RATIO) ** (self._steps / ramp)

    def _velocity_like(self, tensor: Tensor) -> Tensor:
        if self._velocity is None:
            self._velocity = torch.zeros_like(tensor)
        return self._velocity

    def state(self) -> dict:
        return {**super().state(), "steps": self._steps, "velocity": self._velocity}

    def load_state(self, state: dict) -> None:
        super().load_state(state)
        self._steps = state["steps"]
        self._velocity = None if state["velocity"] is None else state["velocity"].clone()
