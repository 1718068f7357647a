"""fp16: half precision, 11 significant bits; and `Cast`, the base of fp16 and bf16."""

from __future__ import annotations

from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.chunks import slices
from hpcdist.compress.base import Recoded


class Cast(Recoded):
    """Rounds every element to the nearest number of a shorter dtype; elements beyond its range to its largest number.

    An all-reduce adds in full precision and rounds the sum once. With error feedback, the rank that rounded an element
    or a sum adds the rounding error to its next message.
    """

    faithful = True

    dtype: ClassVar[torch.dtype]  # of messages

    def encode_residual_(self, tensor: Tensor) -> Tensor:
        return self._encode_(tensor, 1)

    def encode_sum_(self, residual: Tensor, tensor: Tensor) -> Tensor:
        return self._encode_(residual, 1, tensor)

    def decode(self, message: Tensor, out: Tensor) -> None:
        out.copy_(self._open(message))

    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        short = self._open(message)
        for chunk in slices(len(out)):
            out[chunk].add_(short[chunk], alpha=weight)

    def share(self, tensor: Tensor, ranks: int) -> Tensor:
        return self._encode_(tensor, ranks)

    def start_sum(self, local: Tensor, ranks: int) -> Tensor:
        return local  # exact: rounded only with the sum

    def combine(self, total: Tensor, ranks: int) -> Tensor:
        return self.encode_residual_(total)

    def _open(self, message: Tensor) -> Tensor:
        aligned = message if message.storage_offset() % self.dtype.itemsize == 0 else message.clone()
        return aligned.view(self.dtype)

    def _encode_(self, tensor: Tensor, ranks: int, addend: Tensor | None = None) -> Tensor:
        """Add `addend` to `tensor`, encode it for a sum over `ranks` messages, and leave the error in `tensor`."""
        info, wide = torch.finfo(self.dtype), torch.finfo(tensor.dtype)
        # The sum over the ranks must be finite, with every addend rounded up.
        limit = min(info.max, wide.max / ranks / (1 + info.eps)) if ranks > 1 else info.max
        # The limit as bits, which ascend with the magnitude; one less, as rounding to the dtype may have raised it.
        bound = int(torch.tensor([limit], dtype=self.dtype).view(torch.int16)) - 1
        short = torch.empty(tensor.shape, dtype=self.dtype)
        for chunk in slices(len(tensor)):
            part, rounded = tensor[chunk], short[chunk]
            if addend is not None:
                self.accumulate(part, addend[chunk])
            rounded.copy_(part)
            if not _all_below(rounded, bound):
                part.clamp_(-wide.max, wide.max)  # a sum may be infinite
                rounded.copy_(part.clamp(-limit, limit))
            part -= rounded
        return short.view(torch.uint8)


def _all_below(short: Tensor, bound: int) -> bool:
    """Return whether the bits of all magnitudes are below `bound`; false with infinity or NaN."""
    bits = short.view(torch.int16).numpy()  # half the bytes of the elements, and NumPy's maximum of int16 is fast
    return bool(bits.max() < bound and bits.view(np.uint16).max() < bound + (1 << 15))  # positive, negative


@final
class Fp16(Cast):
    """Round every element to IEEE half precision; magnitudes above 65,504 become 65,504.

    Bytes for n elements: 2n. Error: at most 2⁻¹¹ of each element between 6.1e-5 and 65,504 in magnitude, 3e-8 below.
    All-reduced sums have the same error: they are added in full precision and rounded once.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "allreduce", compression="fp16")

    Reference: Paulius Micikevicius, Sharan Narang, Jonah Alben, Gregory Diamos, Erich Elsen, David Garcia, Boris
    Ginsburg, Michael Houston, Oleksii Kuchaiev, Ganesh Venkatesh, Hao Wu, "Mixed precision training", 2018.
    """

    dtype = torch.float16
