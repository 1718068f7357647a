"""TernGrad: every element becomes −s, 0 or s at random, where s is its parameter's largest magnitude."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.chunks import CACHED, slices
from hpcdist.compress.base import Compressor, Span
from hpcdist.compress.coding.elements import as_scale, largest, mean, views
from hpcdist.config.settings import Field

_RANDOM_BITS = 16
_PER_BYTE = 5  # 3^5 = 243 fit one


@final
class TernGrad(Compressor):
    """Round each element x at random to sign(x)·s, with probability |x|/s, or to 0, so that the expectation is x.

    s is the largest magnitude in the parameter, after elements are clipped to `clip` times their root mean square.
    Error feedback is refused: it would diverge with this variance. Clipped parts are lost.

    Bytes for n elements: n/5, as 5 elements fill a byte (1.6 bits each; 2 in the paper), and 4 for each parameter.

    Error: unbiased up to clipping and 2⁻¹⁷ of s, as each element uses 16 random bits. Its variance in a parameter v is
    s‖v‖₁ − ‖v‖², at most (√d − 1)/2 · ‖v‖² for d elements.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "allreduce", compression={"name": "terngrad", "clip": 2.5})

    Reference: Wei Wen, Cong Xu, Feng Yan, Chunpeng Wu, Yandan Wang, Yiran Chen, Hai Li, "TernGrad: ternary gradients to
    reduce communication in distributed deep learning", 2017; clipping in its section 3.3, s by layers.
    """

    class Config(Compressor.Config):
        clip: float | None = Field(
            2.5, "clip magnitudes at this multiple of a parameter's root mean square; none: no clipping", gt=0
        )
        seed: int = Field(0, "seed of the random rounding, which differs between ranks", ge=0)

        def check_feedback(self) -> None:
            raise ValueError(
                "strategy.compression.error_feedback must be false with terngrad, whose variance would make it "
                "diverge; got true. Remove it, or use qsgd."
            )

    feeds_back = False
    remembers = ("taken",)

    config: Config

    def __init__(self, config: Config, count: int, spans: Sequence[Span] = ()):
        super().__init__(config, count, spans)
        self._bytes = -(-count // _PER_BYTE)
        self.taken = 0  # number of messages so far

    def encode_residual_(self, tensor: Tensor) -> Tensor:
        generator = np.random.SFC64((self.config.seed, self.stream, self.taken))
        self.taken += 1
        message = np.empty(4 * len(self.parts) + self._bytes, np.uint8)
        scales, packed = views(message, len(self.parts))
        signs = np.zeros(_PER_BYTE * self._bytes, np.int8)
        for index, part in enumerate(self.parts):
            scales[index] = self._scale(tensor[part])
            self._round(tensor[part], float(scales[index]), generator, signs[part])
        _pack(signs, packed)
        return torch.from_numpy(message)

    def _scale(self, values: Tensor) -> float:
        limit = largest(values)
        if self.config.clip is not None:
            limit = min(limit, self.config.clip * mean(values, 2))
        return as_scale(limit)

    @staticmethod
    def _round(values: Tensor, scale: float, source: np.random.SFC64, signs: np.ndarray) -> None:
        """Write the signs −1, 0 and 1 for −scale, 0 and scale; leave the errors in `values`."""
        if not scale:
            return
        unit = 1 << _RANDOM_BITS
        work = torch.empty(min(CACHED, len(values)), dtype=values.dtype)
        for chunk in slices(len(values)):
            part, sign = values[chunk], signs[chunk]
            sums = work[: len(part)]
            raised = sums.numpy()  # the same memory
            np.copyto(raised, source.random_raw(-(-len(part) // 4)).view(np.uint16)[: len(part)])
            # Adding a uniform number and rounding down rounds up as often as the fraction says; zero stays zero.
            sums.add_(part, alpha=unit / scale)
            np.subtract((raised >= unit).view(np.int8), (raised < 0).view(np.int8), out=sign)
            part.add_(sums.copy_(torch.from_numpy(sign)), alpha=-scale)  # faster than to add bytes

    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        scales, packed = views(message.numpy(), len(self.parts))
        signs = torch.from_numpy(_unpack(packed))
        for scale, part in zip(scales.tolist(), self.parts, strict=True):
            for chunk in slices(part.stop - part.start):
                elements = slice(part.start + chunk.start, part.start + chunk.stop)
                out[elements].add_(signs[elements], alpha=weight * scale)


def _pack(signs: np.ndarray, out: np.ndarray) -> None:
    """Pack five signs into a byte, as digits of base 3, one from each fifth of the array."""
    parts = signs.view(np.uint8).reshape(_PER_BYTE, -1)
    np.add(parts[-1], 1, out=out)
    for part in parts[-2::-1]:
        out *= 3
        out += part
        out += 1


def _unpack(packed: np.ndarray) -> np.ndarray:
    """Reverse `_pack`: return the signs, int8, and padding up to a multiple of five."""
    signs = np.empty((_PER_BYTE, len(packed)), np.uint8)
    remaining = packed
    for part in signs:
        remaining, digits = remaining // 3, remaining  # NumPy divides many bytes by a number at a time
        np.subtract(digits, remaining * 3, out=part)
        part -= 1  # -1 wraps around: the bytes are int8
    return signs.view(np.int8).reshape(-1)
