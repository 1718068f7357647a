"""Bins: each element is sent as the number of its bin, and decoded as the mean of the bin."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from hpcdist.compress.base import Compressor
from hpcdist.compress.coding.centroids import add_parts, encode_parts
from hpcdist.config.settings import Field


@final
class Bins(Compressor):
    """Send each element as the mean of its bin; a parameter has B = 2^`bits` bins, around the mean of its elements.

    The bins span six standard deviations; elements outside go to the outer bins. A parameter keeps its mean. A
    parameter of at most B elements is sent exactly, in float32.

    Bytes for n elements in t parameters: at most bits·n/8 + 4B(t + 1) + 4, less by the entropy of the bins, which is
    about 1.5 of 2 bits where elements are normally distributed. Error: at most half a bin's width, 3σ/B, or as far as
    an element lies beyond the outer bins.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "allreduce", compression={"name": "bins", "bits": 2})

    Reference: Amir Sarfi, Benjamin Thérien, Joel Lidin, Eugene Belilovsky, "Communication efficient LLM pre-training
    with SparseLoCo", 2025: the quantiser of its published code. Entropy coding of the bins is our addition.
    """

    class Config(Compressor.Config):
        bits: int = Field(2, "bits of an element before entropy coding", ge=2, le=8)

    config: Config

    def encode_residual_(self, tensor: Tensor) -> Tensor:
        coded, means = encode_parts(tensor.numpy(), self._parts(), 1 << self.config.bits)
        return torch.from_numpy(np.concatenate([means.view(np.uint8), coded]))

    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        head = 4 * len(self.spans) << self.config.bits  # bytes of the means
        means, coded = message[:head].numpy().copy().view(np.float32), message[head:].numpy().copy()
        add_parts(coded, means, self._parts(), out.numpy(), weight)

    def _parts(self) -> list[slice]:
        return [slice(span.start, span.stop) for span in self.spans]
