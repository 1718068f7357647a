"""E3M0: four bits per element, a sign and one of seven powers of two below the tensor's largest magnitude."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.chunks import CACHED, slices
from hpcdist.compress.base import Compressor
from hpcdist.compress.coding.elements import add_by_bit, as_scale, largest, views

_SIGN, _FRACTIONS = 8, [0.0, *(2.0 ** (code - 7) for code in range(1, 8))]  # of the scale, for the codes 0 to 7


@final
class E3m0(Compressor):
    """Round each element to the nearest of 0 and ± s·2⁻⁶ ... ± s/2, ± s, where s is the tensor's largest magnitude.

    The type has one sign bit, three exponent bits and no mantissa. Halfway between two values, the one further from
    zero is used. Error feedback is off by default.

    Bytes for n elements: ⌈n/2⌉ + 4. Error: none for the largest element; at most a third of an element of s/64 or more;
    elements below s/128 become 0: use error feedback, or send tensors of similar magnitude separately.

    Example:
        >>> options = {"name": "e3m0", "error_feedback": True}
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "allreduce", compression=options)

    Reference: Arthur Douillard et al., "Streaming DiLoCo with overlapping communication: towards a distributed free
    lunch", 2025, which sends four bits per element; the common scale of a tensor is our choice.
    """

    faithful = False
    feeds_back = False

    def encode_residual_(self, tensor: Tensor) -> Tensor:
        message = np.zeros(4 + -(-self.count // 2), np.uint8)
        scales, packed = views(message, 1)
        scales[0] = as_scale(largest(tensor))
        if scales[0]:
            values = tensor.numpy()
            table = _values(scales[0], values.dtype)
            _pack(values, table, packed)
            add_by_bit(packed, values, _pairs(-table))  # leaves the error
        return torch.from_numpy(message)

    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        scales, packed = views(message.numpy(), 1)
        values = out.numpy()
        add_by_bit(packed, values, _pairs(weight * _values(scales[0], values.dtype)))


def _values(scale: np.float32, dtype: np.dtype) -> np.ndarray:
    """Return the value of each code, shape (16,)."""
    positive = float(scale) * np.array(_FRACTIONS)
    return np.concatenate([positive, -positive]).astype(dtype)


def _pairs(values: np.ndarray) -> np.ndarray:
    """Return the values of each byte's two codes, low bits first, shape (256, 2)."""
    return np.stack([np.tile(values, 16), np.repeat(values, 16)], axis=1)


def _pack(values: np.ndarray, table: np.ndarray, packed: np.ndarray) -> None:
    """Overwrite `packed`, uint8, by the codes of `values`, two to a byte; `table`: the value of each code."""
    # The smallest magnitude that rounds to each code: halfway, 3/4 of the code's value, but 1/2 for the first code.
    bounds = table[1:_SIGN] * np.array([0.5, *[0.75] * 6], table.dtype)
    count = min(CACHED, len(values))
    magnitudes, reached = np.empty(count, values.dtype), np.empty(count, bool)
    codes = np.zeros(count + count % 2, np.uint8)
    for chunk in slices(len(values)):
        part, part_codes = values[chunk], codes[: chunk.stop - chunk.start]
        magnitude, mask = magnitudes[: len(part_codes)], reached[: len(part_codes)]
        np.abs(part, out=magnitude)
        np.less(part, 0, out=mask)
        np.left_shift(mask.view(np.uint8), _SIGN.bit_length() - 1, out=part_codes)  # the sign bit
        for bound in bounds:  # faster than a search per element
            np.greater_equal(magnitude, bound, out=mask)
            part_codes += mask.view(np.uint8)
        if len(part_codes) % 2:
            codes[len(part_codes)] = 0
        # Two codes, a byte each, as a 16-bit number: its low byte gets the second one's bits, too.
        pairs = codes[: len(part_codes) + len(part_codes) % 2].view("<u2")
        packed[chunk.start // 2 : -(-chunk.stop // 2)] = pairs | pairs >> 4
