"""The base of top-k and deep gradient compression: send the largest elements as they are."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from hpcdist.compress.base import Compressor
from hpcdist.compress.coding import sparse
from hpcdist.compress.coding.sample import Sample

_DTYPES = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}


class Largest(Compressor):
    """Send the elements of largest magnitude, rounded to the type `values`; rounding errors stay in the tensor.

    Of elements equal in magnitude the first are chosen; zeros are not sent. Numbers beyond the range of `values` are
    sent as its largest one.
    """

    class Config(Compressor.Config):
        """Options of compressors that send the largest elements."""

        ratio: float = Field(0.01, gt=0, le=1, description="part of the elements to send")
        values: Literal["fp16", "fp32", "fp64"] = Field("fp32", description="type in which values are sent")

    def __init__(self, config: Config, count, spans=()):
        super().__init__(config, count, spans)
        self._sample = Sample(count)
        self._dtype = _DTYPES[config.values]

    def _take(self, values: np.ndarray, ratio: float) -> tuple[Tensor, np.ndarray]:
        """Encode the largest `values` in place; return the message, and the indices of the elements that it sends."""
        if not self.count:
            return sparse.pack(np.empty(0, np.int64), 0), np.empty(0, np.int64)
        indices = self._sample.largest(values, max(1, round(ratio * self.count)))
        chosen, most = values[indices], np.finfo(self._dtype).max
        sent = np.clip(chosen, -most, most).astype(self._dtype)
        values[indices] = chosen - sent
        return sparse.pack(indices, self.count, sent), indices

    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        if len(message):
            indices, (sent,) = sparse.unpack(message, self.count, ((self._dtype, -1),))
            values = out.numpy()
            values[indices] += sent.astype(values.dtype) * weight

    def state(self) -> dict:
        return {"drawn": self._sample.drawn}

    def load_state(self, state: dict) -> None:
        self._sample.drawn = state["drawn"]
