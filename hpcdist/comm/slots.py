"""Slots: shared memory of one node's ranks, in which each rank publishes its input to a collective call.

A call uses one buffer of this memory, which has a row for each rank; later calls reuse it. A fingerprint is a hash of
everything that must be the same on all ranks in a call, such as operation, shape and dtype.
"""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

MAX_LENGTHS = 64  # row lengths whose buffers are cached
MAX_BUFFERS = 32  # of one length per table: a power of two
SPREAD_BYTES = 1 << 21  # total size of these buffers over all ranks
LINE = 64  # bytes of a cache line
SHORT_ROW = 1 << 13  # bytes; shorter rows use a single buffer per table

_OF_NUMPY = {torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool, torch.uint8}
_OF_NUMPY |= {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64}
_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def numeric(tensor: Tensor) -> Tensor:
    """View a dense tensor in a dtype that NumPy has, of the same width."""
    return tensor if tensor.dtype in _OF_NUMPY else tensor.view(_OF_WIDTH[tensor.itemsize])


def array_of(tensor: Tensor) -> np.ndarray:
    """View a dense tensor on the host as NumPy's array of shape (n,). It does not keep the memory alive."""
    # Not by `Tensor.numpy`, after which the memory can never be resized, as FSDP does.
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return np.frombuffer(memory, _numpy_dtype(tensor.dtype))


@cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return numeric(torch.empty(0, dtype=dtype)).numpy().dtype


class GatheredRows(NamedTuple):
    """The bytes that ranks publish: all rows, shape (ranks, n); only the row of rank `source` is used if given."""

    rows: np.ndarray
    source: int | None = None


class Rows(NamedTuple):
    """One buffer of slots: a row for each rank of a node, in rank order, as tensors or NumPy arrays."""

    table: Any  # shape (ranks, count)
    rows: list[Any]
    parts: Any  # [r, s]: rank r's part for rank s, shape (ranks, ranks, count / ranks); None if not divisible
    gathered: GatheredRows  # the bytes of all rows


class RowBuffers:
    """The buffers for rows of one length in a node's slots, used in turn: `buffers[i]` is the buffer of call i.

    Writing a cache line that another core has read is slow while that core's cache holds it: filling a row of 64 KiB
    took 8 microseconds, and 2 in a buffer not used for 1 MiB. Consecutive calls never share memory, whatever their row
    lengths: even calls use one table, odd calls the other.

    Args:
        tables: the memory of even and of odd calls, shape (ranks, elements) each, tensors or arrays.
        memory: the same as arrays of bytes.
        count: elements of a row.
    """

    def __init__(self, tables: Sequence[Any], memory: Sequence[np.ndarray], count: int):
        self._tables, self._memory, self._count = tables, memory, count
        (ranks, length), itemsize = tables[0].shape, tables[0].itemsize
        row = max(1, -(-count * itemsize // LINE)) * LINE  # bytes
        self._stride = row // itemsize
        max_buffers = min(MAX_BUFFERS, length // self._stride, SPREAD_BYTES // ranks // row) if row >= SHORT_ROW else 1
        self._rows: list[Rows | None] = [None] * (1 << max(1, max_buffers.bit_length()))  # in both tables: 2, 4, 8...

    def __getitem__(self, call: int) -> Rows:
        """Return the buffer of call number `call`."""
        call %= len(self._rows)
        buffer = self._rows[call]
        if buffer is None:
            start, ranks = (call >> 1) * self._stride, len(self._tables[0])  # `call & 1` chooses the table
            table, parts = self._tables[call & 1][:, start : start + self._count], None
            if self._count % ranks == 0:
                parts = table.reshape(ranks, ranks, self._count // ranks)
            itemsize = table.itemsize
            gathered = GatheredRows(self._memory[call & 1][:, start * itemsize : (start + self._count) * itemsize])
            buffer = self._rows[call] = Rows(table, list(table), parts, gathered)
        return buffer


class Slots(abc.ABC):
    """Shared memory in which each rank publishes its input to a collective call.

    A call: write the local row of the next buffer, `synchronize`, then read the other ranks' rows. A published row
    stays unchanged until the next `synchronize` has returned.

    Args:
        tables: the memory of even and of odd calls, shape (ranks, n_bytes) each, uint8.

    Attributes:
        n_bytes: length of the longest row.
        calls: number of calls so far, which is the number of the next call.
        period: calls i and i + period use the same buffer, for any row length: a multiple of each number of buffers.
        counted: whether reading other ranks' rows counts as fetched bytes; if not, rows count when they are sent.
    """

    period = 2 * MAX_BUFFERS
    counted = True

    def __init__(self, rank: int, tables: tuple[Tensor, Tensor]):
        self.rank, self.calls = rank, 0
        self.size, self.n_bytes = tables[0].shape
        self.tables, self._memory = tables, [table.numpy() for table in tables]
        self._row_buffers: dict[tuple[torch.dtype, int, bool], RowBuffers] = {}

    def row_buffers(self, dtype: torch.dtype, count: int, arrays: bool = False) -> RowBuffers:
        """Return the buffers for rows of `count` elements; that of the next call is `row_buffers(...)[slots.calls]`.

        Args:
            arrays: rows are NumPy arrays, as `array_of` returns them; else tensors.
        """
        buffers = self._row_buffers.get((dtype, count, arrays))
        if buffers is None:
            if len(self._row_buffers) >= MAX_LENGTHS:
                self._row_buffers.clear()
            tables: list[Any] = [table.view(dtype) for table in self.tables]
            if arrays:
                tables = [numeric(table).numpy() for table in tables]
            buffers = self._row_buffers[dtype, count, arrays] = RowBuffers(tables, self._memory, count)
        return buffers

    @abc.abstractmethod
    def synchronize(self, fingerprint: int, gathered: GatheredRows | None = None) -> bool:
        """Collective. Publish the local row of this call, and wait until all ranks have published theirs.

        Returns:
            Whether all ranks have the same fingerprint; the same on all ranks.

        Args:
            fingerprint: identifies the call: an integer above -2^63 and below 2^63.
            gathered: the rows that other ranks need; None if no rank has input. The same for equal fingerprints.
        """

    def close(self) -> None:
        """Release the memory. No rank may be in a call."""
        self._row_buffers.clear()
