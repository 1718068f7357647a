"""Top-k of each chunk: send the largest elements of every block of a matrix; error feedback keeps the others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, final

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.chunks import alongside
from hpcdist.compress.base import Compressor, Span
from hpcdist.compress.coding import sparse
from hpcdist.compress.coding.blocks import Blocks
from hpcdist.compress.coding.centroids import add_parts, encode_parts
from hpcdist.compress.coding.elements import FLOATS, as_sent
from hpcdist.config.settings import Field

_BINS = 4  # of 2bit


@final
class ChunkTopk(Compressor):
    """Send the largest elements of each chunk, by magnitude: the part `ratio` of its elements, at least one, or `keep`.

    The chunks of a matrix are blocks of at most `side` × `side` elements; the sides of a block are the largest divisors
    of the matrix's sides. Chunks of a vector have at most `side` elements. Other parameters are matrices whose rows are
    the first axis. So every layer sends elements, unlike `topk`. With `values` = 2bit the chosen elements of a
    parameter are sent as the means of four bins, see `bins`. The residual is multiplied by `decay` before each message:
    with `decay` = 0.95, an element that grows by δ per message reaches at most 20δ, and is never sent if that is less
    than the smallest element sent.

    Bytes for k elements chosen of n in t parameters: 4 + k(v + H/8) where v is 2, 4 or 8 by `values` and H, the
    entropy of a gap in bits, about log₂(n/k) + 1.44; with 2bit v is at most 1/4, and 16(t + 1) + 4 bytes are added.
    Error: ‖x − message‖² ≤ (1 − `ratio`)‖x‖² up to the rounding of values.

    Example:
        >>> options = {"name": "chunk_topk", "ratio": 1 / 64, "decay": 0.95}
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "allreduce", compression=options)

    Reference: Amir Sarfi, Benjamin Thérien, Joel Lidin, Eugene Belilovsky, "Communication efficient LLM pre-training
    with SparseLoCo", 2025; chunks and quantiser as in its published code; entropy coding is our addition.
    """

    class Config(Compressor.Config):
        ratio: float = Field(1 / 64, "part of the elements of a chunk to send", gt=0, le=1)
        keep: int | None = Field(
            None, "elements of each chunk to send, all of a smaller chunk; none: the part ratio", ge=1
        )
        side: int = Field(64, "largest number of rows and of columns of a chunk, or of its elements", ge=1)
        values: Literal["fp16", "fp32", "fp64", "2bit"] = Field("fp32", "type in which values are sent")
        decay: float = Field(1.0, "factor of the residual before each message; needs error_feedback", ge=0, le=1)

        def check_without_feedback(self) -> None:
            if self.decay != 1:
                raise ValueError(
                    "strategy.compression.decay must be omitted where error_feedback is false, because there is no "
                    f"residual; got {self.decay}. Remove one of the two."
                )

    config: Config

    def __init__(self, config: Config, count: int, spans: Sequence[Span] = ()):
        super().__init__(config, count, spans)
        self._starts = np.array([span.start for span in self.spans[1:]], np.int64)

    def accumulate(self, residual: Tensor, tensor: Tensor) -> None:
        for left, added in alongside(residual, tensor):
            left.mul_(self.config.decay).add_(added)

    def encode_residual_(self, tensor: Tensor) -> Tensor:
        values = tensor.numpy()
        indices = np.concatenate([_largest(tensor, s, self.config) for s in self.spans] or [np.empty(0, np.int64)])
        if self.config.values != "2bit":
            sent = as_sent(values[indices], FLOATS[self.config.values])
            values[indices] -= sent
            return sparse.pack(indices, self.count, sent)
        chosen = values[indices]
        coded, means = encode_parts(chosen, self._parameter_slices(indices), _BINS)
        values[indices] = chosen
        return sparse.pack(indices, self.count, np.array([len(coded)], np.uint32), coded, means)

    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        if not len(message):
            return
        values = out.numpy()
        indices, payload = self._unpack(message)
        if self.config.values != "2bit":
            values[indices] += payload[0].astype(values.dtype) * weight
            return
        _, coded, means = payload
        sent = np.zeros(len(indices), values.dtype)
        add_parts(coded, means, self._parameter_slices(indices), sent, weight)
        values[indices] += sent

    def _unpack(self, message: Tensor) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the indices, and the values; with 2bit the size of the codes, the codes, and the means."""
        if self.config.values != "2bit":
            return sparse.unpack(message, self.count, ((FLOATS[self.config.values], -1),))
        # Bytes of the codes, the first number of the payload; it follows the number of indices.
        size = int(message.numpy()[4:8].copy().view(np.uint32)[0]) if len(message) else 0
        return sparse.unpack(
            message, self.count, ((np.uint32, 1), (np.uint8, size), (np.float32, _BINS * len(self.spans)))
        )

    def count_sent(self, message: Tensor, counts: Tensor) -> None:
        indices, _ = self._unpack(message)
        counts.numpy()[indices] += 1
        for span, chosen_slice in zip(self.spans, self._parameter_slices(indices), strict=True):
            if span.stop > span.start:
                # Zeros are not sent: if a chunk has room for more elements, all its other elements are 0.
                blocks, inside = Blocks.of(span, self.config.side), indices[chosen_slice] - span.start
                has_room = blocks.counts(inside) < _chosen(blocks, self.config)
                if has_room.any():
                    all_zero = torch.ones(span.stop - span.start)
                    all_zero[inside] = 0
                    of_block = blocks.view(counts[span.start : span.stop])
                    of_block += blocks.view(all_zero) * torch.from_numpy(has_room)[:, None, :, None]

    def _parameter_slices(self, indices: np.ndarray) -> list[slice]:
        """Return the slice of ascending indices that belongs to each parameter."""
        cuts = [0, *np.searchsorted(indices, self._starts).tolist(), len(indices)]
        return [slice(*pair) for pair in itertools.pairwise(cuts)]


def _chosen(blocks: Blocks, config: ChunkTopk.Config) -> int:
    """Return the number of elements of each block to send; a smaller block is sent whole."""
    return max(1, round(config.ratio * blocks.height * blocks.width)) if config.keep is None else config.keep


def _largest(tensor: Tensor, span: Span, config: ChunkTopk.Config) -> np.ndarray:
    """Return the ascending indices in `tensor` of the largest elements of each chunk of a parameter, without zeros."""
    size = span.stop - span.start
    if not size:
        return np.empty(0, np.int64)
    blocks = Blocks.of(span, config.side)
    height, width, across = blocks.height, blocks.width, blocks.columns // blocks.width
    chosen = _chosen(blocks, config)
    if chosen >= height * width:
        indices = torch.arange(size)
    else:
        magnitudes = (rows.abs().permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
                      for (rows,) in blocks.chunks(tensor[span.start : span.stop]))  # fmt: skip
        # By block: the indices in it of the chosen elements.
        inside = torch.cat([rows.topk(chosen, sorted=False).indices for rows in magnitudes])
        block = torch.arange(len(inside))[:, None]
        row = block // across * height + inside // width
        indices = (row * blocks.columns + block % across * width + inside % width).reshape(-1).sort().values
    indices += span.start
    return indices[tensor[indices] != 0].numpy()
