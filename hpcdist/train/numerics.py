"""The numbers of a run: mixed precision, and errors where they become NaN or infinite."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import NonFiniteError
from hpcdist.records import StepRecord
from hpcdist.records.summary import is_skipped
from hpcdist.strategies import Strategy

ADVICE = "Lower the learning rate or clip the gradients, and resume from the last checkpoint"


class Precision:
    """Mixed precision: autocasting, and for float16 a scale of the loss; the strategy skips steps that overflow.

    Args:
        amp: "off", "bf16" or "fp16".

    Attributes:
        scaler: scales the loss; enabled only for float16.

    Reference: Paulius Micikevicius et al., "Mixed precision training", 2018.
    """

    def __init__(self, amp: str, device: torch.device):
        self._dtype = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[amp]
        self._device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=amp == "fp16")

    def autocast(self) -> AbstractContextManager:
        """Return the context of the forward pass and the loss."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device.type, self._dtype)

    def step(self, optimizer: Any, evaluate: Callable[[], Tensor]) -> Tensor:
        """Take a step of the optimiser; `evaluate` runs the backward pass of the scaled loss and returns the loss."""
        if not self.scaler.is_enabled():
            return optimizer.step(evaluate)
        loss = evaluate()
        self.scaler.step(optimizer)
        self.scaler.update()
        return loss


def count_skipped(in_a_row: int, record: StepRecord, limit: int) -> int:
    """Return the number of consecutive steps that this worker has skipped; raise NonFiniteError at `limit`."""
    if not record.samples:
        return in_a_row
    in_a_row = in_a_row + 1 if is_skipped(record) else 0
    if in_a_row >= limit:
        raise NonFiniteError(
            f"consecutive steps whose gradient is NaN or infinite must be fewer than max_skipped, {limit}; got as many "
            f"up to step {record.step}. {ADVICE}, or raise max_skipped."
        )
    return in_a_row


def require_finite(strategy: Strategy, comm: Communicator, step: int) -> None:
    """Collective among the surviving ranks. Raise NonFiniteError, on all ranks, unless all parameters are finite.

    An update may be infinite although the gradient is finite: 1e37 times a rate of 100.
    """
    if strategy.config.on_nonfinite == "ignore":
        return
    bad = []
    if not all(torch.isfinite(params.sum()) for params in strategy.model.params):  # the sum itself may overflow
        bad = [name for name, p in strategy.model.module.named_parameters() if not torch.isfinite(p).all()]
    bad_of = comm.gather(bad[:1] and [bad[0], len(bad)])
    for rank in comm.failures.alive:
        if bad_of[rank]:
            name, count = bad_of[rank]
            raise NonFiniteError(
                f"parameters must be finite; got NaN or infinity on rank {rank} after step {step}: {name}"
                f"{f' and {count - 1} more' * (count > 1)}. {ADVICE}, which was saved before."
            )
