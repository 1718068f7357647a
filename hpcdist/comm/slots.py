"""Slots: memory of the ranks of one node, in which each shows the others what it brings to a collective call."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

KNOWN_PLACES = 64  # lengths whose places slots keep
MOST_PLACES = 32  # of rows of one length, in a table: a power of two
SPREAD_BYTES = 1 << 21  # of these places, all ranks' together
LINE = 64  # bytes of a cache line
SHORT_ROW = 1 << 13  # bytes, below which rows stay in one place

_OF_NUMPY = {torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool, torch.uint8}
_OF_NUMPY |= {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64}
_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def numeric(tensor: Tensor) -> Tensor:
    """View a dense tensor in a dtype that NumPy has, of the same width."""
    return tensor if tensor.dtype in _OF_NUMPY else tensor.view(_OF_WIDTH[tensor.itemsize])


def array_of(tensor: Tensor) -> np.ndarray:
    """View a dense tensor on the host as NumPy's array of shape (n,)."""
    try:
        array = tensor.numpy()
    except (RuntimeError, TypeError):  # one with a gradient, or of a dtype that NumPy has not
        array = numeric(tensor.detach()).numpy()
    return array if array.ndim == 1 else array.reshape(-1)


class GatheredRows(NamedTuple):
    """What ranks show each other: the bytes of their rows, shape (ranks, n), or of the row of one rank, `source`."""

    rows: np.ndarray
    source: int | None = None


class Rows(NamedTuple):
    """A row for each rank of a node, in rank order, in tensors or in NumPy's arrays."""

    table: Any  # shape (ranks, count)
    rows: list[Any]
    parts: Any  # shape (ranks, ranks, count / ranks), where it is equal parts: [r, s] is rank r's part for rank s
    gathered: GatheredRows  # all of them


class Places:
    """Where the rows of one length lie in the slots of a node: call after call in another place.

    A line of memory that another core has read is slow to write again, for as long as that core's cache holds it: a
    row of 64 KiB took 8 microseconds to fill, and 2 in a place that has not been used for 1 MiB. Two calls, one after
    the other, have no place in common, whatever the lengths of their rows: even calls use one table, odd ones the
    other.

    Args:
        tables: the memory of even and of odd calls, shape (ranks, elements) each: tensors, or arrays.
        memory: the same, as arrays of bytes.
        count: elements of a row.
    """

    def __init__(self, tables: Sequence[Any], memory: Sequence[np.ndarray], count: int):
        self._tables, self._memory, self._count = tables, memory, count
        (ranks, room), width = tables[0].shape, tables[0].itemsize
        row = max(1, -(-count * width // LINE)) * LINE  # bytes
        self._stride = row // width
        most = min(MOST_PLACES, room // self._stride, SPREAD_BYTES // ranks // row) if row >= SHORT_ROW else 1
        self._rows: list[Rows | None] = [None] * (1 << max(1, most.bit_length()))  # in both tables: a power of two

    def __getitem__(self, call: int) -> Rows:
        """Return the place of a call, by its number."""
        call %= len(self._rows)
        found = self._rows[call]
        if found is None:
            start, ranks = (call >> 1) * self._stride, len(self._tables[0])
            table, parts = self._tables[call & 1][:, start : start + self._count], None
            if self._count % ranks == 0:
                parts = table.reshape(ranks, ranks, self._count // ranks)
            width = table.itemsize
            gathered = GatheredRows(self._memory[call & 1][:, start * width : (start + self._count) * width])
            found = self._rows[call] = Rows(table, list(table), parts, gathered)
        return found


class Slots(abc.ABC):
    """Memory in which each rank shows the others what it brings to a collective call.

    A call goes like this: fill the own row of the next place, `synchronize`, and read the others' rows of that place,
    until the next call: what a rank has shown stays as it is until it has met the others once more.

    Args:
        tables: the memory of even and of odd calls, shape (ranks, n_bytes) each, of bytes.

    Attributes:
        n_bytes: of the longest row.
        tables: as given.
        calls: how often the ranks have met, which is the number of the next call.
        period: a call has the place that one has had so many calls before.
        counted: whether a rank that reads others' rows counts them as fetched; else rows are counted as they are sent.
    """

    period = 2 * MOST_PLACES
    counted = True

    def __init__(self, rank: int, tables: tuple[Tensor, Tensor]):
        self.rank, self.calls = rank, 0
        self.size, self.n_bytes = tables[0].shape
        self.tables, self._memory = tables, [table.numpy() for table in tables]
        self._places: dict[tuple[torch.dtype, int, bool], Places] = {}

    def places(self, dtype: torch.dtype, count: int, arrays: bool = False) -> Places:
        """Return the places of rows of `count` elements, which are tensors, or NumPy's arrays as `array_of` views them.

        The place of the next call is `places[slots.calls]`.
        """
        places = self._places.get((dtype, count, arrays))
        if places is None:
            if len(self._places) >= KNOWN_PLACES:
                self._places.clear()
            tables: list[Any] = [table.view(dtype) for table in self.tables]
            if arrays:
                tables = [numeric(table).numpy() for table in tables]
            places = self._places[dtype, count, arrays] = Places(tables, self._memory, count)
        return places

    @abc.abstractmethod
    def synchronize(self, fingerprint: int, gathered: GatheredRows | None = None) -> bool:
        """Collective. Publish the local row of this call, and wait until all ranks have shown theirs.

        Returns:
            The same on all ranks: whether their notes are equal.

        Args:
            fingerprint: what must be the same on all ranks: an integer of more than -2^63, and less than 2^63.
            gathered: the rows of this call that others want to see; None where nobody has brought anything. Ranks with
                equal notes give alike.
        """

    def close(self) -> None:
        """Release the memory. Nobody may be in a call."""
        self._places.clear()
