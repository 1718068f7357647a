"""Error feedback: the error of a message is added to the next tensor, so that it is sent late, not never."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcdist.compress.base import Compressor
from hpcdist.compress.none import Uncompressed
from hpcdist.model.pieces import alongside


class Feedback:
    """A compressor with its residual, the sum of the errors so far: Σ tensors = Σ messages + residual.

    Memory: one more tensor. Without feedback (`enabled` false) the error of a message is forgotten.

    Args:
        like: a tensor of the same length and dtype. The residual of half precision is float32.

    Reference: Frank Seide, Hao Fu, Jasha Droppo, Gang Li, Dong Yu, "1-bit stochastic gradient descent and its
    application to data-parallel distributed training of speech DNNs", 2014; Sai Praneeth Karimireddy, Quentin Rebjock,
    Sebastian Stich, Martin Jaggi, "Error feedback fixes SignSGD and other gradient compression schemes", 2019.
    """

    def __init__(self, compressor: Compressor, like: Tensor, enabled: bool = True):
        self.compressor, self._enabled = compressor, enabled
        self._whole = Uncompressed(Uncompressed.Config(), like.numel())
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.residual = torch.zeros(like.numel(), dtype=dtype)
        self._all_sent = True  # the residual is zero

    def encode(self, tensor: Tensor, whole: bool = False) -> Tensor:
        """Encode the sum of `tensor`, on any device, and the residual; uncompressed if `whole`."""
        if whole:
            self._accumulate(tensor)
            return self._whole.encode_residual_(self.residual)
        return self.compressor.encode_sum_(self.residual, self._on_host(tensor))

    def encode_change_(self, new: Tensor, old: Tensor, share: float, whole: bool = False) -> Tensor:
        """Encode `share` times the change from `old` to `new`, and set `new` back to `old`; flat, on any device."""
        if self._adds and new.is_cpu and new.dtype == self.residual.dtype and not whole:
            self._begin()
            for residual, changed, before in alongside(self.residual, new, old):
                residual.add_(changed.sub(before).mul_(share))
                changed.copy_(before)
            return self.compressor.encode_residual_(self.residual)
        message = self.encode(new.sub_(old).mul_(share), whole)
        new.copy_(old)
        return message

    def add_residual_(self, tensor: Tensor) -> None:
        """Add the residual to `tensor`, on any device; the rounding error in its dtype stays in the residual."""
        if self._all_sent and self._adds:
            return
        self._accumulate(tensor)
        tensor.copy_(self.residual)
        self.residual.sub_(tensor.to(self.residual))

    def add(self, message: Tensor, out: Tensor, whole: bool = False, weight: float = 1.0) -> None:
        """Decode a message and add `weight` times the result to `out`, on any device."""
        compressor = self._whole if whole else self.compressor
        if out.dtype == self.residual.dtype and out.device == self.residual.device:
            compressor.add(message, out, weight)
        else:
            decoded = torch.empty_like(self.residual)
            compressor.decode(message, decoded)
            out.add_(decoded.to(out.device, out.dtype), alpha=weight)

    def to_send(self, tensor: Tensor) -> Tensor:
        """Add `tensor`, on any device, to the residual, and return the residual for the compressor to encode."""
        self._accumulate(tensor)
        return self.residual

    def _accumulate(self, tensor: Tensor) -> None:
        self.compressor.accumulate(self.residual, self._on_host(tensor))

    def _on_host(self, tensor: Tensor) -> Tensor:
        """Copy a tensor that will be added to the residual to its device."""
        self._begin()
        return tensor.to(self.residual.device)

    def _begin(self) -> None:
        """Prepare the residual for an addition; without feedback, forget it."""
        if not self._enabled:
            self.residual.zero_()
        self._all_sent = False

    @property
    def _adds(self) -> bool:
        """Tell whether accumulating is plain addition for this compressor."""
        return type(self.compressor).accumulate is Compressor.accumulate

    def state(self) -> dict:
        return {"residual": self.residual, "compressor": self.compressor.state()}

    def set_residual(self, residual: Tensor) -> None:
        """Begin with a saved residual."""
        self.residual.copy_(residual)
        self._all_sent = not self.residual.any()

    def load_state(self, state: dict) -> None:
        self.set_residual(state["residual"])
        self.compressor.load_state(state["compressor"])
