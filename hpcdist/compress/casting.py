"""What fp16 and bf16 share: every element is rounded to a shorter type."""

from __future__ import annotations

import abc
from collections.abc import Callable

import torch
from torch import Tensor

from hpcdist.compress.base import Linear


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
        out.add_(message.view(self.dtype), alpha=weight)

    def reduce(self, tensor: Tensor, out: Tensor, ranks: int, allreduce: Callable[[Tensor], None]) -> None:
        short = self._take(tensor, ranks)
        allreduce(short)
        out.copy_(short)

    def _take(self, tensor: Tensor, ranks: int) -> Tensor:
        most = torch.finfo(self.dtype).max / ranks  # so that the sum of all ranks' is finite
        short = tensor.clamp(-most, most).to(self.dtype)
        tensor.sub_(short)
        return short
