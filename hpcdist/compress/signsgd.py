"""signSGD with majority vote: every rank sends signs, and all apply the sign of the majority."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from hpcdist.compress.base import Recoded, Span
from hpcdist.compress.coding.elements import add_signs

_HEAD = 4  # bytes: the value of a set bit


@final
class SignSgd(Recoded):
    """Send the sign of each element as a bit; all ranks apply the sign of the sum of all signs, ±1 for each element.

    The learning rate is the size of every element's step, so it must be far smaller than for SGD. Exact zeros, and ties
    of an even number of ranks, count alternately as + and −; a rank with only zeros does not vote. Works only with
    all-reduce, where all votes are available, and without error feedback, because signs have no magnitudes.

    Bytes for n elements: n/8, and 4 for each of p chunks, as for an all-reduce: each rank counts the votes on one chunk
    and sends the outcome, n/(8p) bytes, to all ranks. Error: all magnitudes are lost; training converges if the noise
    of gradients is symmetric and unimodal.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "allreduce", compression="signsgd")

    Reference: Jeremy Bernstein, Yu-Xiang Wang, Kamyar Azizzadenesheli, Anima Anandkumar, "signSGD: compressed
    optimisation for non-convex problems", 2018, algorithm 1 with majority vote.
    """

    class Config(Recoded.Config):
        def check_feedback(self) -> None:
            raise ValueError(
                "strategy.compression.error_feedback must be false with signsgd, whose messages have no magnitudes; "
                "got true. Remove it, or use ef_signsgd or onebit."
            )

    feeds_back = False
    combines = "majority"
    remembers = ("turn",)

    def __init__(self, config: Config, count: int, spans: Sequence[Span] = ()):
        super().__init__(config, count, spans)
        self.turn = 0  # ties count as + in odd turns, as − in even turns

    def accumulate(self, residual: Tensor, tensor: Tensor) -> None:
        self.turn ^= 1
        super().accumulate(residual, tensor)

    def encode_residual_(self, tensor: Tensor) -> Tensor:
        return self._code(tensor, 1.0)

    def combine(self, total: Tensor, ranks: int) -> Tensor:
        return self._code(total, float(ranks))

    def _code(self, tensor: Tensor, size: float) -> Tensor:
        """Encode each element as ±size by its sign, and leave the error in `tensor`; no bytes if all are zero."""
        values = tensor.numpy()
        if not values.any():
            return torch.empty(0, dtype=torch.uint8)
        bits = np.packbits(values >= 0 if self.turn else values > 0)
        add_signs(bits, tensor, [-size], [slice(0, len(tensor))])
        return torch.from_numpy(np.concatenate([np.array([size], np.float32).view(np.uint8), bits]))

    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        if len(message):
            size = message[:_HEAD].numpy().copy().view(np.float32).item()
            add_signs(message[_HEAD:].numpy(), out, [weight * size], [slice(0, len(out))])
