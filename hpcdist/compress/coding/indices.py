"""Sets of indices as entropy-coded gaps.

Where each of n elements is in the set with probability d, independently, the gap to the next one is geometric, and no
code needs fewer bits per index than the entropy of that, about log2(1/d) + 1.44. A gap's high part is coded under this
distribution by asymmetric numeral systems, its low bits, which are as good as uniform, under the uniform one.

Reference: Jarek Duda, "Asymmetric numeral systems: entropy coding combining speed of Huffman coding with compression
rate of arithmetic coding", 2013; Robert Bamler, "Understanding entropy coding with asymmetric numeral systems", 2022.
"""

from __future__ import annotations

import constriction
import numpy as np

Categorical, Uniform = constriction.stream.model.Categorical, constriction.stream.model.Uniform
AnsCoder = constriction.stream.stack.AnsCoder

_HIGH_MEAN = 4  # the high part's mean is 4 to 8
_MOST_LOW_BITS = 23  # the coder's uniform distribution goes up to 24
_ESCAPE = 127  # stands for every high part from here on; the gap is coded once more, whole


def encode(indices: np.ndarray, count: int) -> np.ndarray:
    """Encode ascending indices, each once and below `count` (at most 2^31), as uint32 words."""
    if not len(indices):
        return np.empty(0, np.uint32)
    gaps = np.empty(len(indices), np.int32)
    gaps[0] = indices[0]
    np.subtract(indices[1:], indices[:-1], out=gaps[1:], casting="unsafe")
    gaps[1:] -= 1
    shift, model = _model(len(indices), count)
    high = np.minimum(gaps >> shift, _ESCAPE)
    coder = AnsCoder()  # a stack: what is decoded first is encoded last
    whole = gaps[high == _ESCAPE]
    _push(coder, whole >> 16, 1 << 15)
    _push(coder, whole & 0xFFFF, 1 << 16)
    _push(coder, gaps & ((1 << shift) - 1), 1 << shift)
    coder.encode_reverse(high, model)
    return coder.get_compressed()


def decode(words: np.ndarray, size: int, count: int) -> np.ndarray:
    """Decode the words of `encode` to `size` ascending indices below `count`, int64."""
    if not size:
        return np.empty(0, np.int64)
    shift, model = _model(size, count)
    coder = AnsCoder(words)
    high = coder.decode(model, size)
    gaps = (high << shift) + _pop(coder, size, 1 << shift)
    escaped = np.flatnonzero(high == _ESCAPE)
    low = _pop(coder, len(escaped), 1 << 16)
    gaps[escaped] = (_pop(coder, len(escaped), 1 << 15) << 16) + low
    gaps[1:] += 1
    return np.cumsum(gaps, dtype=np.int64)


def _model(size: int, count: int) -> tuple[int, Categorical]:
    """Count the low bits, and make the distribution of the high part; the same to the bit on every machine."""
    stay = 1 - size / count  # the probability that an element is not in the set
    shift = min(max(0, int(count / (size * _HIGH_MEAN)).bit_length() - 1), _MOST_LOW_BITS)
    for _ in range(shift):  # products and quotients only: a library's power may differ in the last bit
        stay *= stay
    tail = np.cumprod(np.full(_ESCAPE + 1, stay))
    tail[1:], tail[0] = tail[:-1], 1.0
    tail[:-1] *= 1 - stay
    return shift, Categorical(tail, perfect=False)


def _push(coder: AnsCoder, symbols: np.ndarray, limit: int) -> None:
    if limit > 1 and len(symbols):
        coder.encode_reverse(symbols, Uniform(limit))


def _pop(coder: AnsCoder, size: int, limit: int) -> np.ndarray:
    return coder.decode(Uniform(limit), size) if limit > 1 and size else np.zeros(size, np.int32)
