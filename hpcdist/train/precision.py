"""Mixed precision: what to compute in, and a loss scale for float16 that all strategies can follow."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from hpcdist.flat import FlatModel

GROWTH_STEPS = 2000  # steps without overflow after which the scale doubles


class Precision:
    """Autocasting, and for float16 a loss scale kept between powers of two.

    torch's GradScaler decides on each rank by itself whether a step is left out, and hangs a synchronous strategy
    when ranks differ. Here gradients are divided by the scale before the strategy sees them, and an overflow is a
    non-finite gradient like any other: the strategy, told to skip those, leaves the step out on the ranks concerned.

    Args:
        amp: "off", "bf16" or "fp16".

    Reference: Paulius Micikevicius et al., "Mixed precision training", 2018.
    """

    def __init__(self, amp: str, device: torch.device):
        self._dtype = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[amp]
        self._device = device
        self.scale = 2.0**16 if amp == "fp16" else 1.0
        self._good_steps = 0

    @property
    def scaled(self) -> bool:
        """True if the loss is scaled, so that gradients must not be sent before the backward pass has ended."""
        return self._dtype is torch.float16

    def autocast(self) -> AbstractContextManager:
        """Surrounds the forward pass and the loss."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device.type, self._dtype)

    def backward(self, loss: Tensor, model: FlatModel) -> None:
        """Backward pass of the loss; gradients come out unscaled."""
        if not self.scaled:
            loss.backward()
            return
        (loss * self.scale).backward()
        for parameter in model.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self.scale)

    def step_done(self, skipped: bool) -> None:
        """Halves the scale after a step that was skipped, doubles it after many that were not."""
        if not self.scaled:
            return
        self._good_steps = 0 if skipped else self._good_steps + 1
        if skipped:
            self.scale = max(1.0, self.scale / 2)
        elif self._good_steps == GROWTH_STEPS:
            self.scale, self._good_steps = self.scale * 2, 0

    def state(self) -> dict:
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state(self, state: dict) -> None:
        self.scale, self._good_steps = state["scale"], state["good_steps"]
