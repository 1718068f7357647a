"""The base of fp16 and bf16: round every element to a shorter type."""

from __future__ import annotations

import abc

import numpy as np
import torch
from torch import Tensor

from hpcdist.compress.base import Recoded
from hpcdist.compress.coding.pieces import chunks


class Cast(Recoded):
    """Round every element to the nearest number of a shorter type; beyond its range, to its largest number.

    In an all-reduce sums are taken in full precision and rounded once. With error feedback nothing is lost: the
    rounding error of an element, or of a sum, is added to the next one by the rank that rounded it. Without, it is
    forgotten.
    """

    faithful = True

    @property
    @abc.abstractmethod
    def dtype(self) -> torch.dtype:
        """Return the type that elements are rounded to."""

    def take(self, tensor: Tensor) -> Tensor:
        return self._take(tensor, 1)

    def take_sum(self, residual: Tensor, tensor: Tensor) -> Tensor:
        return self._take(residual, 1, tensor)

    def decode(self, message: Tensor, out: Tensor) -> None:
        out.copy_(self._open(message))

    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        short = self._open(message)
        for piece in chunks(len(out)):
            out[piece].add_(short[piece], alpha=weight)

    def share(self, tensor: Tensor, ranks: int) -> Tensor:
        return self._take(tensor, ranks)

    def begin(self, own: Tensor, ranks: int) -> Tensor:
        return own  # exactly: it is rounded with the sum

    def combine(self, total: Tensor, ranks: int) -> Tensor:
        return self.take(total)

    def _open(self, message: Tensor) -> Tensor:
        aligned = message if message.storage_offset() % self.dtype.itemsize == 0 else message.clone()
        return aligned.view(self.dtype)

    def _take(self, tensor: Tensor, ranks: int, addend: Tensor | None = None) -> Tensor:
        """Encode `tensor` in place, with `addend` added to it before, for a sum over `ranks` messages."""
        info, wide = torch.finfo(self.dtype), torch.finfo(tensor.dtype)
        # The sum over the ranks must be finite, with every addend rounded up.
        most = min(info.max, wide.max / ranks / (1 + info.eps)) if ranks > 1 else info.max
        bound = torch.tensor([most], dtype=self.dtype).view(torch.int16).item() - 1  # `most` may be rounded up here
        short = torch.empty(tensor.shape, dtype=self.dtype)
        for piece in chunks(len(tensor)):
            part, rounded = tensor[piece], short[piece]
            if addend is not None:
                self.accumulate(part, addend[piece])
            rounded.copy_(part)
            if not _all_below(rounded, bound):
                part.clamp_(-wide.max, wide.max)  # a sum may be infinite
                rounded.copy_(part.clamp(-most, most))
            part -= rounded
        return short.view(torch.uint8)


def _all_below(short: Tensor, bound: int) -> bool:
    """Tell whether the bits of all magnitudes are below `bound`, where those of infinity and NaN never are."""
    bits = short.view(torch.int16).numpy()  # half the bytes of the elements, and NumPy's maximum of them is fast
    return bool(bits.max() < bound and bits.view(np.uint16).max() < bound + (1 << 15))
