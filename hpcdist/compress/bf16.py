"""bf16: the range of float32, 8 significant bits."""

from __future__ import annotations

from typing import final

import torch

from hpcdist.compress.fp16 import Cast


@final
class Bf16(Cast):
    """Round every element to bfloat16, the upper half of a float32.

    Bytes for n elements: 2n. Error: at most 2⁻⁸ of each element of at least 1.2e-38 in magnitude.
    All-reduced sums have the same error: they are added in full precision and rounded once.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "allreduce", compression="bf16")

    Reference: Dhiraj Kalamkar and others, "A study of BFLOAT16 for deep learning training", 2019.
    """

    dtype = torch.bfloat16
