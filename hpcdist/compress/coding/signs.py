"""Signs as bits, and adding them up."""

from __future__ import annotations

import numpy as np

from hpcdist.compress.coding.pieces import chunks

_SIGNS = 2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1) - 1  # of each byte


def add(bits: np.ndarray, out: np.ndarray, step: float) -> None:
    """Add `step` to the elements whose bit is 1, and subtract it from the others.

    Args:
        bits: of NumPy's packbits, uint8, one bit for each element of `out`.
        out: float32 or float64. Overwritten.
    """
    table = (_SIGNS * step).astype(out.dtype)
    for piece in chunks(len(out)):  # which begin at whole bytes
        packed = bits[piece.start // 8 : -(-piece.stop // 8)]
        values = np.empty((len(packed), 8), out.dtype)
        np.take(table, packed, axis=0, out=values, mode="clip")  # "raise" would go through a buffer
        out[piece] += values.reshape(-1)[: piece.stop - piece.start]
