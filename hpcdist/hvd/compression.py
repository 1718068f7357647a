"""How tensors are made smaller before they travel, by Horovod's names."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.compress import JointCompression, Reduction, Span


class NoneCompressor:
    """Makes a tensor smaller, and back; a script may bring its own."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what travels, and what `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        return tensor


class FP16Compressor(NoneCompressor):
    """Floats travel in 16 bits; they are summed in 32."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.half(), tensor.dtype) if tensor.is_floating_point() else (tensor, tensor.dtype)

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        return tensor.to(context)


class BF16Compressor(FP16Compressor):
    """Floats travel in bfloat16; they are summed in float32."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(torch.bfloat16), tensor.dtype) if tensor.is_floating_point() else (tensor, tensor.dtype)


class Compressed(NoneCompressor):
    """One of hpcdist's compressors, for DistributedOptimizers: each rank keeps the errors of its messages.

    The errors are sent with later messages of the same optimiser; they are not part of a checkpoint.

    Args:
        name: of the compressor.
        options: as in `hpcdist compressors`.

    Raises:
        ConfigError: there is no such compressor, or an option breaks a rule.
    """

    def __init__(self, name: str, **options: Any):
        self.config = JointCompression.from_mapping({"name": name, **options}, "compression")
        self._sums: dict[str, tuple[Communicator, Reduction]] = {}  # by names of calls

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:  # type: ignore[override]
        raise ValueError(
            f"compression of single calls must be Compression.none, fp16 or bf16; got {self.config.name}, which keeps "
            "errors of earlier calls. Give it to DistributedOptimizer."
        )

    def anew(self) -> Compressed:
        """Return another one with the same options, and without errors."""
        other = copy.copy(self)
        other._sums = {}
        return other

    def sum_of(
        self, name: str, comm: Communicator, tensors: Sequence[Tensor], shapes: Sequence[torch.Size]
    ) -> Reduction:
        """Collective, the first time. Return what sums the tensors of a name; they are flat, and keep their lengths."""
        made = self._sums.get(name)
        if made is None or made[0] is not comm:
            every = [[Span(0, len(one), tuple(shape))] for one, shape in zip(tensors, shapes)]
            made = self._sums[name] = comm, Reduction(comm, self.config, tensors, every)
        return made[1]


class Compression:
    none, fp16, bf16, by = NoneCompressor, FP16Compressor, BF16Compressor, Compressed
