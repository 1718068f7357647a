"""How tensors are made smaller before they travel, by Horovod's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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


class Compression:
    none, fp16, bf16 = NoneCompressor, FP16Compressor, BF16Compressor
