"""E3M0: four bits per element, a sign and one of seven powers of two below the tensor's largest magnitude."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.pieces import CACHED, slices
from hpcdist.compress.base import Compressor
from hpcdist.compress.coding.elements import as_scale, largest, views

_SIGN, _FRACTIONS = 8, [2.0 ** (code - 7) for code in range(1, 8)]  # of the scale, for the codes 1 to 7


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
        message = np.empty(4 + -(-self.count // 2), np.uint8)
        scales, packed = views(message, 1)
        scales[0] = as_scale(largest(tensor))
        scale = float(scales[0])  # rounded to float32
        values = _values(scale, tensor.dtype)
        # The least magnitude that is rounded to each code: halfway, 3/4 of the next one, but 1/2 of the first.
        bounds = values[1:_SIGN] * torch.tensor([0.5, *[0.75] * 6], dtype=tensor.dtype)
        for piece in slices(self.count) if scale else ():
            part = tensor[piece]
            codes = torch.bucketize(part.abs(), bounds, out_int32=True, right=True)
            codes += _SIGN * (part < 0)
            part -= values[codes]
            nibbles = torch.zeros(len(codes) + len(codes) % 2, dtype=torch.uint8)
            nibbles[: len(codes)] = codes
            packed[piece.start // 2 : -(-piece.stop // 2)] = nibbles[::2] | nibbles[1::2] << 4
        if not scale:
            packed[:] = 0
        return torch.from_numpy(message)

    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        scales, packed = views(message.numpy(), 1)
        values = weight * _values(float(scales[0]), out.dtype).numpy()
        pairs = np.stack([np.tile(values, 16), np.repeat(values, 16)], axis=1)  # of each byte's two codes
        work = np.empty((-(-min(CACHED, self.count) // 2), 2), pairs.dtype)
        for piece in slices(self.count):  # pieces begin at whole bytes
            here, part = packed[piece.start // 2 : -(-piece.stop // 2)], out[piece].numpy()
            found = work[: len(here)]
            np.take(pairs, here, axis=0, out=found, mode="clip")  # "raise" would go through a buffer
            part += found.reshape(-1)[: len(part)]


def _values(scale: float, dtype: torch.dtype) -> Tensor:
    """Return the value of each code, shape (16,)."""
    positive = [0.0, *(scale * fraction for fraction in _FRACTIONS)]
    return torch.tensor([*positive, *(-value for value in positive)], dtype=dtype)
