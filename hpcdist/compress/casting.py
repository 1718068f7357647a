"""What fp16 and bf16 share: every element is rounded to a shorter type."""

from __future__ import annotations

import abc
from collections.abc import Callable

import torch
from torch import Tensor

from hpcdist.compress.base import Linear
from hpcdist.compress.chunks import chunks


class Cast(Linear):
    """Rounds to nearest, and to the type's largest number what exceeds it.

    In an all-reduce the sum itself is rounded at each addition, which the error feedback doesn't see.
    """

    faithful = True

    @property
    @abc.abstractmethod
    def dtype(self) -> torch.dtype:
        """What elements are rounded to."""

    def take(self, tensor: Tensor) -> Tensor:
        return self._take(tensor, 1).view(torch.uint8)

    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        aligned = message if message.storage_offset() % self.dtype.itemsize == 0 else message.clone()
        short = aligned.view(self.dtype)
        for found in chunks(len(out)):
            out[found].add_(short[found].to(out.dtype), alpha=weight)

    def reduce(self, tensor: Tensor, out: Tensor, ranks: int, allreduce: Callable[[Tensor], None]) -> None:
        short = self._take(tensor, ranks)
        allreduce(short)
        out.copy_(short)

    def _take(self, tensor: Tensor, ranks: int) -> Tensor:
        info = torch.finfo(self.dtype)
        most = info.max / ranks / (1 + info.eps) ** (ranks - 1)  # the sum must be finite, however it was rounded
        short = torch.empty(tensor.shape, dtype=self.dtype)
        for found in chunks(len(tensor)):
            part = tensor[found]
            short[found] = part.clamp(-most, most)
            part.sub_(short[found].to(tensor.dtype))
        return short
