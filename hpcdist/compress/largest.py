"""What top-k and deep gradient compression share: the largest elements are sent as they are."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from hpcdist.compress import sparse
from hpcdist.compress.base import Compressor
from hpcdist.compress.sample import Sample

_DTYPES = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}


class Largest(Compressor):
    """Sends elements of largest magnitude, rounded to `values`; what rounding takes from them stays.

    Of elements equal in magnitude the first are chosen; zeros are not sent. What is beyond the range of `values` is
    sent as its largest number.
    """

    class Config(Compressor.Config):
        """How many elements are sent, and as what."""

        ratio: float = Field(0.01, gt=0, le=1, description="part of the elements to send")
        values: Literal["fp16", "fp32", "fp64"] = Field("fp32", description="type in which values are sent")

    def __init__(self, config: Config, count, spans=()):
        super().__init__(config, count, spans)
        self._sample = Sample(count)
        self._dtype = _DTYPES[config.values]

    def _take(self, values: np.ndarray, ratio: float) -> tuple[Tensor, np.ndarray]:
        """The message for these values, which keep what it lacks; and the indices that it names."""
        if not self.count:
            return sparse.pack(np.empty(0, np.int64), 0), np.empty(0, np.int64)
        found = self._sample.largest(values, max(1, round(ratio * self.count)))
        chosen, most = values[found], np.finfo(self._dtype).max
        sent = np.clip(chosen, -most, most).astype(self._dtype)
        values[found] = chosen - sent
        return sparse.pack(found, self.count, sent), found

    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        if len(message):
            found, (sent,) = sparse.unpack(message, self.count, ((self._dtype, -1),))
            values = out.numpy()
            values[found] += sent.astype(values.dtype) * weight

    def state(self) -> dict:
        return {"drawn": self._sample.drawn}

    def load_state(self, state: dict) -> None:
        self._sample.drawn = state["drawn"]
