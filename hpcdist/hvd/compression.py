"""Compression of tensors before they are sent, by Horovod's names."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.compress import JointCompression, Reduction, Span


class NoneCompressor:
    """Compresses and decompresses a tensor (here: unchanged); a script may pass its own class."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and the context for `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        return tensor


class FP16Compressor(NoneCompressor):
    """Send floats in 16 bits; sums are in 32 bits."""

    dtype = torch.float16

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.to(cls.dtype) if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        return tensor.to(context)


class BF16Compressor(FP16Compressor):
    """Send floats in bfloat16; sums are in float32."""

    dtype = torch.bfloat16


class Compressed(NoneCompressor):
    """One of hpcdist's compressors, for DistributedOptimizers, with error feedback on each rank.

    The residuals are sent with later messages of the same optimiser; they are not part of a checkpoint.

    Args:
        name, options: of the compressor, as in `hpcdist compressors`; ConfigError if they break a rule.
    """

    def __init__(self, name: str, **options: Any):
        self.config = JointCompression.from_mapping({"name": name, **options}, "compression")
        self._reductions: dict[str, tuple[Communicator, Reduction]] = {}  # by names of calls

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:  # type: ignore[override]
        raise ValueError(
            f"compression of single calls must be Compression.none, fp16 or bf16; got {self.config.name}, which keeps "
            "errors of earlier calls. Pass it to DistributedOptimizer."
        )

    def copy(self) -> Compressed:
        """Return a compressor with the same options, and without residuals."""
        other = copy.copy(self)
        other._reductions = {}
        return other

    def reduction(
        self, name: str, comm: Communicator, tensors: Sequence[Tensor], shapes: Sequence[torch.Size]
    ) -> Reduction:
        """Return the reduction, with its residuals, for the calls of this name. Collective when it is created.

        The tensors are flat, and had `shapes` before. Each call of this name has tensors of the same lengths.
        """
        cached = self._reductions.get(name)
        if cached is None or cached[0] is not comm:
            spans = [[Span(0, len(tensor), tuple(shape))] for tensor, shape in zip(tensors, shapes)]
            cached = self._reductions[name] = comm, Reduction(comm, self.config, tensors, spans)
        return cached[1]


class Compression:
    none, fp16, bf16, by = NoneCompressor, FP16Compressor, BF16Compressor, Compressed
