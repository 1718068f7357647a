"""Compute in mixed precision, for float16 with torch's own loss scale."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class Precision:
    """Autocasting, and for float16 a scale of the loss; the strategy skips a step on all ranks that overflow.

    Args:
        amp: "off", "bf16" or "fp16".

    Reference: Paulius Micikevicius et al., "Mixed precision training", 2018.
    """

    def __init__(self, amp: str, device: torch.device):
        self._dtype = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[amp]
        self._device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=amp == "fp16")

    def autocast(self) -> AbstractContextManager:
        """Return the context for the forward pass and the loss."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device.type, self._dtype)

    def step(self, optimizer: torch.optim.Optimizer, evaluate: Callable[[], Tensor]) -> Tensor:
        """Take a step of the optimiser; `evaluate` runs the backward pass, through `scaled`, and returns the loss."""
        if not self.scales:
            return optimizer.step(evaluate)
        loss = evaluate()
        self.scaler.step(optimizer)
        self.scaler.update()
        return loss

    @property
    def scales(self) -> bool:
        """Tell whether the loss is scaled."""
        return self.scaler.is_enabled()

    def scaled(self, loss: Tensor) -> Tensor:
        """Scale the loss for its backward pass."""
        return self.scaler.scale(loss)

    def state(self) -> dict:
        return self.scaler.state_dict()

    def load_state(self, state: dict) -> None:
        if state:
            self.scaler.load_state_dict(state)
