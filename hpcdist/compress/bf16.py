"""bf16: the range of float32, 8 significant bits."""

from __future__ import annotations

from typing import final

import torch

from hpcdist.compress.casting import Cast


@final
class Bf16(Cast):
    """Sends the upper half of every float32.

    Bytes for n elements: 2n. Error: at most 2⁻⁸ of each element of at least 1.2e-38 in magnitude.

    Reference: Dhiraj Kalamkar and others, "A study of BFLOAT16 for deep learning training", 2019.
    """

    dtype = torch.bfloat16
