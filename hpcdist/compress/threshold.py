"""Threshold: elements with magnitudes above a threshold τ are sent as ±τ; the rest stays in the residual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from hpcdist.compress.base import Compressor, Span
from hpcdist.compress.coding import sparse
from hpcdist.compress.coding.elements import mean
from hpcdist.compress.coding.sparse import Sample
from hpcdist.config.settings import Field, joint_rule

_PAYLOAD = ((np.float32, 1), (np.uint8, -8))  # the threshold, and a bit per index, set for positive elements


def _short(tau: float) -> np.float32:
    """Round a threshold to float32, as it is sent."""
    return np.float32(min(tau, float(np.finfo(np.float32).max)))


@final
class Threshold(Compressor):
    """Send +τ or −τ for each element with |x| > τ; error feedback keeps the remainder and the other elements.

    By default τ is a quantile of |x| in a sample, chosen in each step so that about the part `density` of the elements
    is sent. Or it is fixed by `tau`, in the unit of the tensors that are sent (gradients or updates).

    Bytes for k of n elements: 8 + k/8 + k·H/8, where H is the entropy of a gap in bits, about log₂(n/k) + 1.44; none if
    k = 0. Error: x if |x| ≤ τ, else |x| − τ. With error feedback, the error stays at most τ if inputs do; an input
    that stays above τ is sent too slowly, and its error grows.

    Example:
        >>> options = {"name": "threshold", "density": 0.01}
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "allreduce", compression=options)

    Reference: Nikko Strom, "Scalable distributed DNN training using commodity GPU cloud computing", 2015; for τ from a
    density, Nikoli Dryden, Tim Moon, Sam Ade Jacobs, Brian Van Essen, "Communication quantization for data-parallel
    training of deep neural networks", 2016.
    """

    class Config(Compressor.Config):
        density: float = Field(0.01, "approximate part of the elements to send, which sets tau", gt=0, le=1)
        tau: float | None = Field(None, "value that is sent for each larger element; none: by density", gt=0)

        @joint_rule
        def _one_of_them(self) -> None:
            if self.tau is not None and "density" in self.model_fields_set:
                raise ValueError(
                    "strategy.compression.tau must be none where a density is given; got "
                    f"tau = {self.tau}, density = {self.density}. Set one of the two."
                )

    config: Config
    remembers = ("drawn",)
    drawn = property(lambda self: self._sample.drawn, lambda self, drawn: setattr(self._sample, "drawn", drawn))

    def __init__(self, config: Config, count: int, spans: Sequence[Span] = ()):
        super().__init__(config, count, spans)
        self._sample = Sample(count)

    def encode_residual_(self, tensor: Tensor) -> Tensor:
        values = tensor.numpy()
        tau, indices = self._split(values)
        positive = values[indices] > 0
        values[indices] -= np.where(positive, tau, -tau)
        return sparse.pack(indices, self.count, np.array([tau]), np.packbits(positive))

    def _split(self, values: np.ndarray) -> tuple[np.float32, np.ndarray]:
        """Return the threshold and the indices of larger elements."""
        if self.config.tau is not None:
            tau = _short(self.config.tau)
            return tau, sparse.above(values, tau)
        tau = _short(self._sample.bound(values, self.config.density))
        if not tau:  # fewer nonzero elements than requested
            nonzero = values[sparse.above(values, 0.0)]
            tau = _short(mean(torch.from_numpy(nonzero)) / 2)
        indices = sparse.above(values, tau) if tau else np.empty(0, np.int64)
        if not len(indices) and tau:  # many elements are equal to τ and would never be sent
            tau = np.nextafter(tau, np.float32(0))
            indices = sparse.above(values, tau) if tau else indices
        return tau, indices

    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        if len(message):
            indices, (tau, bits) = sparse.unpack(message, self.count, _PAYLOAD)
            values, step = out.numpy(), float(tau[0]) * weight
            values[indices] += np.array([-step, step], values.dtype).take(np.unpackbits(bits, count=len(indices)))

    def count_sent(self, message: Tensor, counts: Tensor) -> None:
        counts.numpy()[sparse.unpack(message, self.count, _PAYLOAD)[0]] += 1
