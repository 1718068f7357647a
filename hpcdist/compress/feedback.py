"""Error feedback: what a message lacks is added to the next tensor, so that it is sent late rather than never."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpcdist.compress.base import Compressor, Linear
from hpcdist.compress.none import Uncompressed


class Feedback:
    """A compressor's tensor and its residual: Σ tensors = Σ messages + residual, at every step.

    Memory: one tensor more. Without feedback (`enabled` false) what a message lacks is forgotten.

    Args:
        like: a tensor of the length and dtype of those to come. Half precision is accumulated in float32.

    Reference: Frank Seide, Hao Fu, Jasha Droppo, Gang Li, Dong Yu, "1-bit stochastic gradient descent and its
    application to data-parallel distributed training of speech DNNs", 2014; Sai Praneeth Karimireddy, Quentin Rebjock,
    Sebastian Stich, Martin Jaggi, "Error feedback fixes SignSGD and other gradient compression schemes", 2019.
    """

    def __init__(self, compressor: Compressor, like: Tensor, enabled: bool = True):
        self.compressor, self._enabled = compressor, enabled
        self._whole = Uncompressed(Uncompressed.Config(), like.numel())
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.residual = torch.zeros(like.numel(), dtype=dtype)

    def encode(self, tensor: Tensor, whole: bool = False) -> Tensor:
        """The message for `tensor`, on any device, and for what has not been sent before; `whole`: uncompressed."""
        self._accumulate(tensor)
        return (self._whole if whole else self.compressor).take(self.residual)

    def add(self, message: Tensor, out: Tensor, whole: bool = False, weight: float = 1.0) -> None:
        """Adds to `out`, on any device, `weight` times what a message of such a feedback stands for."""
        compressor = self._whole if whole else self.compressor
        if out.dtype == self.residual.dtype and out.device == self.residual.device:
            compressor.add(message, out, weight)
        else:
            decoded = torch.empty_like(self.residual)
            compressor.decode(message, decoded)
            out.add_(decoded.to(out.device, out.dtype), alpha=weight)

    def reduce(self, tensor: Tensor, out: Tensor, ranks: int, allreduce) -> None:
        """Collective. See `Linear.reduce`."""
        compressor: Linear = self.compressor
        self._accumulate(tensor)
        compressor.reduce(self.residual, out, ranks, allreduce)

    def _accumulate(self, tensor: Tensor) -> None:
        if not self._enabled:
            self.residual.zero_()
        self.compressor.accumulate(self.residual, tensor.to(self.residual.device))

    def state(self) -> dict:
        return {"residual": self.residual, "compressor": self.compressor.state()}

    @staticmethod
    def adapted(states: Sequence[dict]) -> dict:
        """One state for every rank of a world of another size: means of the ranks' tensors; all else is the first's."""
        compressors = [state["compressor"] for state in states]
        return {
            "residual": _mean([state["residual"] for state in states]),
            "compressor": {key: _mean([state[key] for state in compressors]) for key in compressors[0]},
        }

    def load_state(self, state: dict) -> None:
        self.residual.copy_(state["residual"])
        self.compressor.load_state(state["compressor"])


def _mean(values: list[Any]) -> Any:
    """Of tensors, None counting as zeros: ranks that were silent in the warm-up have none yet. Else the first value."""
    like = next((value for value in values if isinstance(value, Tensor)), None)
    if like is None:
        return values[0]
    return torch.stack([torch.zeros_like(like) if value is None else value for value in values]).mean(dim=0)
