"""Read samples by index, in any order and repeatedly: from a memory map of the file, or through HDF5."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import cast

import h5py
import numpy as np

from hpcdist.data.format import Column, damage

CACHE_SLOTS = 10_007  # slots of HDF5's hash table of cached chunks: a prime, far above their number


class MappedRows:
    """Samples in a memory map, at the offsets that HDF5 has reported for the chunks.

    If somebody truncates the file in place, the process dies of SIGBUS, as with every memory map; `create` replaces
    files by a rename, which is harmless.
    """

    def __init__(self, column: Column, memory: mmap.mmap):
        self._column = column
        self._sample = np.dtype((np.void, column.sample_bytes))  # a sample may lie at any address
        self._offsets = offsets = cast(np.ndarray, column.chunk_offsets)
        chunk_bytes = column.chunk_samples * column.sample_bytes
        self.take: Callable[[np.ndarray], np.ndarray]
        if (np.diff(offsets) == chunk_bytes).all():  # the usual case: the samples are one array
            samples: np.ndarray = np.frombuffer(memory, self._sample, column.samples, int(offsets[0]))
            self.take = lambda indices: self._values(samples.take(indices))
        else:
            self.take = self._take_windows
            self._open_windows(memory)

    def _open_windows(self, memory: mmap.mmap) -> None:
        """View the map as an array of overlapping windows, each as long as a sample.

        Windows begin at the multiples of the greatest common divisor of all distances between samples, so that every
        sample is one of them.
        """
        column, offsets = self._column, self._offsets
        base = int(offsets.min())
        grid = int(np.gcd.reduce(np.append(offsets - base, column.sample_bytes)))
        self._chunk_windows: np.ndarray = (offsets - base) // grid
        self._sample_windows = column.sample_bytes // grid
        count = (column.end_bytes - base - column.sample_bytes) // grid + 1
        self._windows: np.ndarray = np.ndarray((count,), self._sample, memory, offset=base, strides=(grid,))

    def _take_windows(self, indices: np.ndarray) -> np.ndarray:
        column = self._column
        chunk, within = np.divmod(in_range(indices, column.samples), column.chunk_samples)
        return self._values(self._windows[self._chunk_windows[chunk] + within * self._sample_windows])

    def _values(self, samples: np.ndarray) -> np.ndarray:
        column = self._column
        values = samples.view(column.dtype).reshape(-1, *column.shape)
        return values if column.dtype.isnative else values.astype(column.dtype.newbyteorder("="))


class StoredRows:
    """The samples of an HDF5 dataset: one read for each chunk, from the first needed sample in it to the last."""

    def __init__(self, column: Column, file: h5py.File, cache_bytes: int):
        self._column = column
        self._path = Path(file.filename)
        compressed = file[column.name].id.get_create_plist().get_nfilters() > 0
        access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
        # With a cache, HDF5 would read a whole chunk of uncompressed data for each sample.
        access.set_chunk_cache(CACHE_SLOTS, cache_bytes if compressed else 0, 1.0)
        self._dataset = h5py.Dataset(h5py.h5d.open(file.id, column.name.encode(), access))

    def take(self, indices: np.ndarray) -> np.ndarray:
        column = self._column
        indices = in_range(indices, column.samples)
        out = np.empty((len(indices), *column.shape), column.dtype.newbyteorder("="))
        order = np.argsort(indices, kind="stable")
        ordered = indices[order]
        new_chunk = np.flatnonzero(np.diff(ordered // column.chunk_samples)) + 1
        for places, samples in zip(np.split(order, new_chunk), np.split(ordered, new_chunk)):
            if len(samples):
                out[places] = self._read(samples[0], samples[-1] + 1)[samples - samples[0]]
        return out

    def _read(self, start: int, stop: int) -> np.ndarray:
        try:
            return self._dataset[start:stop]
        except (OSError, RuntimeError) as error:
            raise damage(self._path, f"is corrupt in {self._column.name}[{start}:{stop}] ({error})") from error


def in_range(indices: np.ndarray, samples: int) -> np.ndarray:
    """Convert negative indices, which count from the end as in NumPy, to 0..samples-1.

    Raises:
        IndexError: an index is out of bounds.
    """
    indices = np.where(indices < 0, indices + samples, indices)
    if ((indices < 0) | (indices >= samples)).any():
        raise IndexError(f"an index is out of bounds for {samples} samples")
    return indices
