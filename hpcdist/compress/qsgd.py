"""QSGD: every element is rounded at random to a level, a fraction of its bucket's norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, final

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.chunks import CACHED, slices
from hpcdist.compress.base import Compressor, Span
from hpcdist.compress.coding.elements import MAX_SCALE, MIN_SCALE, views
from hpcdist.config.settings import Field

_RANDOM_BITS = 16
_MAX_EXACT_LEVELS = 16  # so that rounding stays in range: it exceeds the largest level by 2s·2⁻²⁴, less than 2⁻¹⁷


@final
class Qsgd(Compressor):
    """Round each element to one of 2s + 1 multiples of its bucket's norm over s, at random and without bias.

    Bytes for n elements: n·b/8 with b = ⌈log₂(2s + 1)⌉ bits, and 4 for each bucket; 7 levels fill 4 bits, 3 fill 3,
    1 fills 2. Levels are packed without entropy coding, which would take about 30 ns for each element instead of 1 ns.

    Error: unbiased up to 2⁻¹⁵ of a level, as each element uses 16 random bits. Its variance in a bucket v of d elements
    is at most min(d/(4s²), √d/s)‖v‖², with either norm. (The paper's bound has d/s²; but the variance of random
    rounding is at most a quarter of the squared distance of neighbours.) Error feedback needs a variance below ‖v‖².

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "allreduce", compression={"name": "qsgd", "levels": 7})

    Reference: Dan Alistarh, Demjan Grubic, Jerry Li, Ryota Tomioka, Milan Vojnovic, "QSGD: communication-efficient SGD
    via gradient quantization and encoding", 2017; lemma 3.1, and the largest magnitude as norm in its section 4.
    """

    class Config(Compressor.Config):
        levels: int = Field(7, "s, number of positive levels; there are as many negative ones", ge=1, le=127)
        bucket: int = Field(128, "d, number of consecutive elements that share one norm", ge=8, multiple_of=8)
        norm: Literal["max", "2-norm"] = Field("max", "norm of a bucket: its largest magnitude, or its 2-norm")
        seed: int = Field(0, "seed of the random rounding, which differs between ranks", ge=0)

        def check_feedback(self) -> None:
            # A bound of the variance in a bucket over its squared 2-norm.
            if min(self.bucket / (4 * self.levels**2), math.sqrt(self.bucket) / self.levels) >= 1:
                raise ValueError(
                    "strategy.compression.levels must satisfy min(d/(4s²), √d/s) < 1 for s levels and buckets of d "
                    f"elements, or error feedback would diverge; got s = {self.levels}, d = {self.bucket}. Set "
                    f"levels = {math.isqrt(self.bucket // 4) + 1}, smaller buckets, or error_feedback = false."
                )

    faithful = True
    remembers = ("taken",)

    config: Config

    def __init__(self, config: Config, count: int, spans: Sequence[Span] = ()):
        super().__init__(config, count, spans)
        self._bits = (2 * config.levels).bit_length()
        self._bucket = max(8, min(config.bucket, -(-count // 8) * 8))
        self._chunk = self._bucket * max(1, CACHED // self._bucket)
        self._buckets = -(-count // self._bucket)
        self.taken = 0  # number of messages so far

    def encode_residual_(self, tensor: Tensor) -> Tensor:
        return self._encode_(tensor)

    def encode_sum_(self, residual: Tensor, tensor: Tensor) -> Tensor:
        return self._encode_(residual, tensor)

    def _encode_(self, tensor: Tensor, addend: Tensor | None = None) -> Tensor:
        """Add `addend` to `tensor` and encode it; leave the error in `tensor`."""
        generator = np.random.SFC64((self.config.seed, self.stream, self.taken))
        self.taken += 1
        values = tensor.numpy()
        message = np.empty(4 * self._buckets + self._bits * -(-self.count // 8), np.uint8)
        norms, codes = views(message, self._buckets)
        work = np.empty((2, self._chunk), values.dtype)
        for chunk in slices(self.count, self._chunk):
            buckets, packed, size = self._slices(chunk)
            if addend is not None:
                self.accumulate(tensor[chunk], addend[chunk])
            norms[buckets], levels = self._round(values[chunk], generator, work)
            codes[packed] = _pack(levels.reshape(-1)[:size], self._bits)
            self._add_levels(tensor[chunk], -1.0, levels, norms[buckets], work[0])
        return torch.from_numpy(message)

    def add(self, message: Tensor, out: Tensor, weight: float = 1.0) -> None:
        norms, codes = views(message.numpy(), self._buckets)
        work = np.empty(self._chunk, out.numpy().dtype)
        for chunk in slices(self.count, self._chunk):
            buckets, packed, size = self._slices(chunk)
            levels = np.empty((buckets.stop - buckets.start, self._bucket), np.uint8)
            levels.reshape(-1)[size:] = 0
            _unpack(codes[packed], self._bits, levels.reshape(-1)[:size])
            self._add_levels(out[chunk], weight, levels, norms[buckets], work)

    def _slices(self, chunk: slice) -> tuple[slice, slice, int]:
        """Return the slices of a chunk's norms and packed levels, and its number of levels, a multiple of 8."""
        size = -(-(chunk.stop - chunk.start) // 8) * 8
        first = chunk.start // 8 * self._bits
        buckets = slice(chunk.start // self._bucket, -(-chunk.stop // self._bucket))
        return buckets, slice(first, first + size // 8 * self._bits), size

    def _round(self, values: np.ndarray, source: np.random.SFC64, work: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Round a chunk at random in `work`; return each bucket's norm, and levels 0 to 2s, shape (buckets, bucket)."""
        size, levels = -(-len(values) // self._bucket) * self._bucket, self.config.levels
        if len(values) < size:  # fill up the last bucket
            work[0, : len(values)], work[0, len(values) : size] = values, 0
            values = work[0, :size]
        elements, scaled = (torch.from_numpy(part[:size]).view(-1, self._bucket) for part in (values, work[1]))
        if self.config.norm == "max":
            norms = torch.abs(elements, out=scaled).amax(dim=1)
        else:
            norms = torch.linalg.vector_norm(elements, dim=1, dtype=torch.float64)  # no square overflows
        norms = np.minimum(norms.numpy(), MAX_SCALE).astype(np.float32)
        factor = np.where(norms < MIN_SCALE, 0, levels / np.maximum(norms, MIN_SCALE)).astype(values.dtype)
        # Adding a uniform number and rounding down rounds up as often as the fraction says. It has 16 random bits, and
        # half of the last one, so that its mean is 1/2.
        np.copyto(work[1, :size], source.random_raw(-(-size // 4)).view(np.uint16)[:size])
        offset = torch.tensor(levels + 2.0 ** -(_RANDOM_BITS + 1), dtype=scaled.dtype)
        torch.add(offset, scaled, alpha=2.0**-_RANDOM_BITS, out=scaled)
        scaled.addcmul_(elements, torch.from_numpy(factor)[:, None])
        # Rounding of `factor`, or a norm beyond float32, may exceed the range.
        if levels > _MAX_EXACT_LEVELS or values.itemsize > 4:
            scaled.clamp_(0, 2 * levels + 0.5)
        return norms, scaled.numpy().astype(np.uint8)

    def _add_levels(self, out: Tensor, weight: float, levels: np.ndarray, norms: np.ndarray, work: np.ndarray) -> None:
        """Add `weight` times the values of `levels`, 0 to 2s, to a chunk of a tensor; overwrite `levels` and `work`."""
        levels -= np.uint8(self.config.levels)
        signed = work[: levels.size].reshape(levels.shape)
        np.copyto(signed, levels.view(np.int8))
        scale = weight * norms.astype(work.dtype) / self.config.levels
        scale_column, full_buckets = torch.from_numpy(scale)[:, None], len(out) // self._bucket
        full = out[: full_buckets * self._bucket].view(full_buckets, self._bucket)
        # NumPy takes twice as long over a column.
        full.addcmul_(torch.from_numpy(signed[:full_buckets]), scale_column[:full_buckets])
        remainder = out[full_buckets * self._bucket :]
        if len(remainder):
            remainder += torch.from_numpy(signed[-1, : len(remainder)]) * scale_column[-1]


def _fields(bits: int) -> Iterator[tuple[int, int]]:
    """Split `bits` into widths that divide a byte; yield each width and the number of bits below it."""
    return ((width, bits & (width - 1)) for width in (8, 4, 2, 1) if bits & width)


def _pack(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack numbers below 2^bits, uint8, into bytes: for each width, the parts of the array side by side."""
    packed = []
    for width, below in _fields(bits):
        shifted = numbers >> below if below else numbers
        parts = (shifted if below + width == bits else shifted & ((1 << width) - 1)).reshape(8 // width, -1)
        byte = parts[0].copy()
        for part in parts[1:]:
            byte *= 1 << width  # NumPy's shift to the left takes ten times as long
            byte |= part
        packed.append(byte)
    return np.concatenate(packed)


def _unpack(packed: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Reverse `_pack`; `out` is overwritten by the numbers."""
    start = 0
    for width, below in _fields(bits):
        parts = out.reshape(8 // width, -1)
        byte = packed[start : start + parts.shape[1]]
        for index, part in enumerate(parts):
            shift = 8 - width * (index + 1)
            shifted = byte >> shift if shift else byte
            numbers = shifted & ((1 << width) - 1) if index else shifted
            if start:  # not the first field
                part |= numbers * (1 << below) if below else numbers
            else:
                np.multiply(numbers, 1 << below, out=part)
        start += parts.shape[1]
