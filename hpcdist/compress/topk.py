"""Top-k: send only the elements of largest magnitude; error feedback keeps the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, final

import numpy as np
from torch import Tensor

from hpcdist.compress.base import Compressor, Span
from hpcdist.compress.coding import sparse
from hpcdist.compress.coding.elements import FLOATS, as_sent
from hpcdist.config.settings import Field


class Largest(Compressor):
    """The base of top-k and deep gradient compression: sends the elements of largest magnitude, rounded to `values`.

    Rounding errors stay in the tensor. Among elements of equal magnitude the first are sent; zeros are never sent. An
    element beyond the range of `values` becomes the largest number of the type.
    """

    class Config(Compressor.Config):
        ratio: float = Field(0.01, "part of the elements to send", gt=0, le=1)
        values: Literal["fp16", "fp32", "fp64"] = Field("fp32", "type in which values are sent")

    config: Config
    remembers: ClassVar[tuple[str, ...]] = ("drawn",)
    drawn = property(lambda self: self._sample.drawn, lambda self, drawn: setattr(self._sample, "drawn", drawn))

    def __init__(self, config: Config, count: int, spans: Sequence[Span] = ()):
        super().__init__(config, count, spans)
        self._sample = sparse.Sample(count)
        self._dtype = FLOATS[config.values]

    def _encode_(self, values: np.ndarray, ratio: float) -> tuple[Tensor, np.ndarray]:
        """Encode the largest `values`, and overwrite them with the error; return the message and its indices."""
        if not self.count:
            return sparse.pack(np.empty(0, np.int64), 0), np.empty(0, np.int64)
        indices = self._sample.largest(values, self._size(ratio))
        chosen = values[indices]
        sent = as_sent(chosen, self._dtype)
        values[indices] = chosen - sent
        return sparse.pack(indices, self.count, sent), indices

    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        if len(message):
            indices, (sent,) = sparse.unpack(message, self.count, ((self._dtype, -1),))
            values = out.numpy()
            values[indices] += sent.astype(values.dtype) * weight

    def count_sent(self, message: Tensor, counts: Tensor) -> None:
        indices, _ = sparse.unpack(message, self.count, ((self._dtype, -1),))
        if len(indices) < self._size(self.config.ratio):  # zeros are not sent: with room for more, all others are 0
            counts.add_(1)
        else:
            counts.numpy()[indices] += 1

    def _size(self, ratio: float) -> int:
        return max(1, round(ratio * self.count))


@final
class Topk(Largest):
    """Send the k elements of largest magnitude of d, k = ratio · d rounded to nearest and at least 1.

    Bytes: 4 + k(v + H/8), where v is 2, 4 or 8 by `values` and H the entropy of a gap in bits, about log₂(d/k) + 1.44;
    none if all elements are zero. Error: ‖x − message‖² ≤ (1 − k/d)‖x‖², a contraction, up to the rounding of values.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "allreduce", compression={"name": "topk", "ratio": 0.01})

    Reference: Alham Fikri Aji, Kenneth Heafield, "Sparse communication for distributed gradient descent", 2017;
    Sebastian Stich, Jean-Baptiste Cordonnier, Martin Jaggi, "Sparsified SGD with memory", 2018, definition 2.1; Dan
    Alistarh and others, "The convergence of sparsified gradient methods", 2018.
    """

    def encode_residual_(self, tensor: Tensor) -> Tensor:
        return self._encode_(tensor.numpy(), self.config.ratio)[0]
