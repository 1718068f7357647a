"""Signs as bits, and adding what they stand for."""

from __future__ import annotations

import numpy as np

from hpcdist.compress.coding.pieces import CHUNK, chunks

BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)  # of each byte, as numbers


def add(bits: np.ndarray, out: np.ndarray, step: float) -> None:
    """Add `step` to the elements whose bit is 1, and subtract it from the others.

    Args:
        bits: of NumPy's packbits, uint8, one bit for each element of `out`.
        out: float32 or float64. Overwritten.
    """
    add_values(bits, out, np.where(BITS, step, -step))


def add_values(bits: np.ndarray, out: np.ndarray, table: np.ndarray) -> None:
    """Add the values that bits stand for to the elements of `out`.

    Args:
        table: the values of each byte's bits, shape (256, 8).
    """
    table, work = table.astype(out.dtype), _work(out)
    for piece in chunks(len(out)):  # which begin at whole bytes
        _add(bits[piece.start // 8 : -(-piece.stop // 8)], out[piece], table, work)


def _work(values: np.ndarray) -> np.ndarray:
    """Make room for a piece's values; once, as the pages of fresh memory take as long as a sum."""
    return np.empty((-(-min(CHUNK, len(values)) // 8), 8), values.dtype)


def _add(packed: np.ndarray, part: np.ndarray, table: np.ndarray, work: np.ndarray) -> None:
    values = work[: len(packed)]
    np.take(table, packed, axis=0, out=values, mode="clip")  # "raise" would go through a buffer
    part += values.reshape(-1)[: len(part)]
