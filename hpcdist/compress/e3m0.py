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

    A number of one sign bit, three bits of exponent and no mantissa. Halfway between two, it is the one further from
    zero. There is no error feedback unless it is asked for.

    Bytes for n elements: ⌈n/2⌉ + 4. Error: none for the largest element; at most a third of an element of s/64 or more;
    elements below s/128 become 0, so they need error feedback, or a tensor whose parts are of one size.

    Reference: Arthur Douillard et al., "Streaming DiLoCo with overlapping communication: towards a distributed free
    lunch", 2025, which sends four bits per element; that these have a common scale, and which, is our choice.
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
            add_by_bit(packed, values, _pairs(-table))
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
    """Return the values of each byte's two codes, the low one first, shape (256, 2)."""
    return np.stack([np.tile(values, 16), np.repeat(values, 16)], axis=1)


def _pack(values: np.ndarray, table: np.ndarray, packed: np.ndarray) -> None:
    """Write the codes of values, two to a byte.

    Args:
        table: the value of each code.
        packed: uint8. Overwritten.
    """
    # The least magnitude that is rounded to each code: halfway, 3/4 of the next one, but 1/2 of the first.
    bounds = table[1:_SIGN] * np.array([0.5, *[0.75] * 6], table.dtype)
    count = min(CACHED, len(values))
    magnitudes, reached = np.empty(count, values.dtype), np.empty(count, bool)
    codes = np.zeros(count + count % 2, np.uint8)
    for chunk in slices(len(values)):
        part, own = values[chunk], codes[: chunk.stop - chunk.start]
        above, far = magnitudes[: len(own)], reached[: len(own)]
        np.abs(part, out=above)
        np.less(part, 0, out=far)
        np.left_shift(far.view(np.uint8), _SIGN.bit_length() - 1, out=own)
        for bound in bounds:  # sooner done than a search in each element's turn
            np.greater_equal(above, bound, out=far)
            own += far.view(np.uint8)
        if len(own) % 2:
            codes[len(own)] = 0
        pairs = codes[: len(own) + len(own) % 2].view("<u2")
        packed[chunk.start // 2 : -(-chunk.stop // 2)] = pairs | pairs >> 4
