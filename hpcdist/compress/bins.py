"""Bins: each element is sent as the number of its bin, and decoded as the mean of the bin."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from hpcdist.compress.base import Compressor
from hpcdist.compress.coding.centroids import decode_codes, encode_codes, quantise


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
        """Options of bins."""

        bits: int = Field(2, ge=2, le=8, description="bits of an element before entropy coding")

    config: Config

    def encode_residual_(self, tensor: Tensor) -> Tensor:
        values, bins = tensor.numpy(), 1 << self.config.bits
        codes, means = np.empty(self.count, np.int32), np.empty((len(self.spans), bins), np.float32)
        for span, span_means in zip(self.spans, means, strict=True):
            part = values[span.start : span.stop]
            part_codes, part_means = quantise(part, bins)
            codes[span.start : span.stop], span_means[:] = part_codes, part_means
            part -= part_means.astype(part.dtype)[part_codes]
        return torch.from_numpy(np.concatenate([means.reshape(-1).view(np.uint8), encode_codes(codes, bins)]))

    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        data, values, bins = message.numpy(), out.numpy(), 1 << self.config.bits
        head = 4 * bins * len(self.spans)  # bytes of the means
        codes = decode_codes(data[head:].copy(), bins)
        for span, means in zip(self.spans, data[:head].copy().view(np.float32).reshape(-1, bins), strict=True):
            values[span.start : span.stop] += weight * means.astype(values.dtype)[codes[span.start : span.stop]]
