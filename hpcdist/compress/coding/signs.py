"""Signs as bits: decode them and add."""

from __future__ import annotations

import numpy as np

from hpcdist.compress.coding.pieces import PIECE, slices

BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)  # the bits of each byte, as numbers


def add(bits: np.ndarray, out: np.ndarray, step: float) -> None:
    """Add `step` to the elements whose bit is 1, and subtract it from the others.

    Args:
        bits: as by NumPy's packbits, uint8, one bit for each element of `out`.
        out: float32 or float64. Overwritten.
    """
    add_values(bits, out, np.where(BITS, step, -step))


def add_values(bits: np.ndarray, out: np.ndarray, table: np.ndarray) -> None:
    """Add the value of each bit to an element of `out`.

    Args:
        table: the values of the 8 bits of each byte, shape (256, 8).
    """
    table = table.astype(out.dtype)
    # One array for all pieces: the pages of fresh memory would take as long as the sum.
    work = np.empty((-(-min(PIECE, len(out)) // 8), 8), out.dtype)
    for piece in slices(len(out)):  # pieces begin at whole bytes
        packed, part = bits[piece.start // 8 : -(-piece.stop // 8)], out[piece]
        values = work[: len(packed)]
        np.take(table, packed, axis=0, out=values, mode="clip")  # "raise" would go through a buffer
        part += values.reshape(-1)[: len(part)]
