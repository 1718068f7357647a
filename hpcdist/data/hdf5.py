"""A data set in an HDF5 file, as a map-style torch data set that also reads whole batches."""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any, cast
from weakref import WeakValueDictionary

import h5py
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpcdist.data.format import Column, Header, damage, open_file, read_header
from hpcdist.data.loader import Samples
from hpcdist.errors import ConfigError, DataError
from hpcdist.records import open_regular

COLUMNS = ("x", "y")
CHECKED_BYTES = 16 << 20  # of a column, for its checksum; of larger ones in so many stretches:
STRETCHES = 64
PROCESS_LEFT = (
    "a dataset on parallel HDF5 must be used in the process that opened it, unpickled, before it is closed. Leave out "
    "mpi_comm where DataLoader has workers."
)
CACHE_SLOTS = 10_007  # slots of HDF5's hash table of cached chunks: a prime, far above their number


class HDF5Dataset(Dataset, AbstractContextManager):
    """One split of a file that `create` wrote: (x, y) tensors by index, or many at once by `batch`.

    The constructor reads and checks the header. Each process opens the data at its first access: by a memory map if the
    samples are one array in the file, through HDF5 if they are compressed or `mpi_comm` is in use. So an instance may
    be pickled, and used in DataLoader's workers under fork and spawn. If everything is mapped, the HDF5 file is closed
    after the header is read, and no lock remains.

    Args:
        path: The file.
        split: The split's name, such as "train".
        memory_map: False always reads through HDF5, for parallel file systems with slow memory maps.
        locking: HDF5's file locks: True, False, "best-effort" (if the file system has locks), or None for the
            environment variable HDF5_USE_FILE_LOCKING, which some builds of HDF5 obey in any case.
        cache_bytes: HDF5's cache of decompressed chunks, for x and y each; without effect on uncompressed data.
        mpi_comm: An mpi4py communicator. If h5py has parallel HDF5, the file is opened on it (driver "mpio"): the
            constructor is then Collective, and reads are independent (from another thread only if MPI allows it).
            Otherwise each rank opens the file by itself.
        columns: The columns to read. Batches have zeros in place of the other one, which take no memory.

    Raises:
        DataError: the file is missing, truncated, corrupt or not of the layout.
        ConfigError: an argument has a wrong value.
    """

    def __init__(
        self,
        path: str | Path,
        split: str = "train",
        *,
        memory_map: bool = True,
        locking: bool | str | None = "best-effort",
        cache_bytes: int = 64 << 20,
        mpi_comm: object = None,
        columns: Collection[str] = COLUMNS,
    ):
        unknown = sorted(set(columns) - set(COLUMNS))
        if unknown:
            raise ConfigError(f"columns must be of x and y; got {unknown[0]!r}.")
        self._columns = frozenset(columns)
        self.path, self.split = Path(path).absolute(), split
        self._mpi_comm = mpi_comm if h5py.get_config().mpi else None
        self._open_options: dict[str, Any] = {"locking": locking, "mpi_comm": self._mpi_comm}
        self._memory_map, self._cache_bytes = memory_map, cache_bytes
        self._pid: int | None = None  # the process that has opened the file
        self._file: h5py.File | None = None
        self._x: MappedRows | StoredRows | None = None
        self._y: MappedRows | StoredRows | None = None
        self._identity = _identity(self.path)
        if self.parallel:
            file = open_file(self.path, **self._open_options)
            try:
                self._header = read_header(file, split)
                self._attach(file)
            finally:
                if self._file is None:
                    file.close()
        else:
            self._header = _header(self.path, split, self._identity, locking)
        header = self._header
        self.task, self.source, self.classes, self.notes = header.task, header.source, header.classes, header.notes
        self.x_shape, self.y_shape = header.x.shape, header.y.shape
        self.x_dtype, self.y_dtype = _torch_dtype(header.x.dtype), _torch_dtype(header.y.dtype)
        factors = header.scale, header.offset
        if any(factor is not None for factor in factors) and not self.x_dtype.is_floating_point:
            self.x_dtype = torch.float32
        self._scale, self._offset = (None if f is None else torch.from_numpy(f).to(self.x_dtype) for f in factors)

    @property
    def parallel(self) -> bool:
        """Whether parallel HDF5 reads the file."""
        return self._mpi_comm is not None

    @property
    def mapped(self) -> bool:
        """Whether x and y are both read from a memory map."""
        return all(self._is_mapped(column) for column in (self._header.x, self._header.y))

    def __len__(self) -> int:
        return self._header.x.samples

    def batch(self, indices: Sequence[int] | np.ndarray | Tensor) -> tuple[Tensor, Tensor]:
        """Read the samples at `indices`, in that order, into new tensors.

        Indices may be unsorted, repeated and negative, as in NumPy.

        Returns:
            x (len(indices), *x_shape) and y (len(indices), *y_shape).

        Raises:
            IndexError: an index is out of bounds.
        """
        if self._pid != os.getpid():
            self._open()
        indices = np.asarray(indices)
        if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
            raise IndexError(f"indices must be a list of integers; got shape {indices.shape} of {indices.dtype}.")
        indices = indices.astype(np.int64, copy=False)
        x = self._take("x", self._x, indices, self.x_shape, self.x_dtype)
        if "x" in self._columns:
            x = x.to(self.x_dtype)
            x = x if self._scale is None else x.mul_(self._scale)
            x = x if self._offset is None else x.add_(self._offset)
        return x, self._take("y", self._y, indices, self.y_shape, self.y_dtype)

    def _take(self, name: str, rows: Any, indices: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Read samples of x or y as they are stored, or return zeros that take no memory."""
        if name in self._columns:
            return torch.from_numpy(rows.take(indices))
        return torch.zeros((), dtype=dtype).expand(len(indices), *shape)

    def labels(self) -> np.ndarray:
        """Read y of all samples."""
        if "y" not in self._columns:
            with HDF5Dataset(self.path, self.split) as dataset:
                return dataset.labels()
        if self._pid != os.getpid():
            self._open()
        return cast(MappedRows, self._y).take(np.arange(len(self)))

    def stored_labels(self) -> Tensor | None:
        """Return y of all samples if it is one integer for each, else None."""
        return torch.from_numpy(self.labels()) if not (self.y_shape or self.y_dtype.is_floating_point) else None

    @property
    def checksum(self) -> str:
        """Return a checksum of the samples as they are read, whatever file they lie in.

        Of an x or y of more than 16 MiB it is that of 64 stretches, evenly spaced, so that it takes little time.
        """
        return _checksum(self.path, self.split, self._identity, self._memory_map, self._open_options["locking"])

    def __getitem__(self, index: int | Sequence[int] | np.ndarray | Tensor) -> tuple[Tensor, Tensor]:
        """Read one sample by an integer, or a batch by several."""
        if np.ndim(index):
            return self.batch(cast(Sequence[int], index))
        x, y = self.batch([cast(int, index)])
        return x[0], y[0]

    def __getitems__(self, indices: Sequence[int]) -> Samples:
        """Read several samples, for torch's DataLoader."""
        return Samples.of(self.batch, indices)

    def close(self) -> None:
        """Release file and map. The next access opens them again.

        Collective with parallel HDF5, where a closed file can't be opened again.
        """
        if self._file is not None and self._pid == os.getpid():
            self._file.close()
        self._pid = None
        self._file = self._x = self._y = None

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getstate__(self) -> dict:
        if self.parallel:
            raise ConfigError(PROCESS_LEFT)
        return {**vars(self), "_pid": None, "_file": None, "_x": None, "_y": None}

    def _open(self) -> None:
        if self.parallel:
            raise ConfigError(PROCESS_LEFT)
        self._attach(None if self.mapped else open_file(self.path, **self._open_options))

    def _attach(self, file: h5py.File | None) -> None:
        """Prepare to read x and y, from `file` where they are not mapped."""
        if _identity(self.path) != self._identity:
            raise damage(self.path, "was changed, replaced or removed since it was opened", "Make a new HDF5Dataset.")
        self._file = file
        self._x, self._y = (self._rows(column) for column in (self._header.x, self._header.y))
        self._pid = os.getpid()

    def _rows(self, column: Column) -> MappedRows | StoredRows:
        """Return a reader of x or y: from a memory map, or through HDF5."""
        if not self._is_mapped(column):
            return StoredRows(column, self._file, self._cache_bytes)
        memory = _maps.get((self.path, self._identity))
        if memory is None:
            with open_regular(self.path) as file:
                try:
                    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                except OSError as error:
                    raise DataError(
                        f"{self.path} must fit into this process's address space to be mapped; got {file.seek(0, 2)} "
                        f"bytes ({error.strerror}). Raise the limit (ulimit -v), or pass memory_map=False."
                    ) from None
            _maps[self.path, self._identity] = memory
        return MappedRows(column, memory, self.path)

    def _is_mapped(self, column: Column) -> bool:
        return self._memory_map and column.offset is not None


# Virtual ranks share a process, so maps, headers and checksums are kept by path and version of the file.
_maps: WeakValueDictionary[object, mmap.mmap] = WeakValueDictionary()  # a map is closed with its last user


@lru_cache(maxsize=64)
def _header(path: Path, split: str, identity: object, locking: bool | str | None) -> Header:
    with open_file(path, locking=locking) as file:
        return read_header(file, split)


@lru_cache(maxsize=64)
def _checksum(path: Path, split: str, identity: object, memory_map: bool, locking: bool | str | None) -> str:
    """See `HDF5Dataset.checksum`; `identity` only distinguishes versions of the file in the cache."""
    with HDF5Dataset(path, split, memory_map=memory_map, locking=locking) as dataset:
        dataset._open()
        header = dataset._header
        factors = [None if factor is None else factor.tolist() for factor in (header.scale, header.offset)]
        checksum = zlib.crc32(repr((header.task, header.classes, factors)).encode())
        for column, rows in ((header.x, dataset._x), (header.y, dataset._y)):
            checksum = zlib.crc32(repr((column.samples, column.shape, column.dtype.name)).encode(), checksum)
            count = min(max(CHECKED_BYTES // column.sample_bytes, 2), column.samples)
            stretches = 1 if count == column.samples else min(STRETCHES, count)
            length = count // stretches
            for start in np.linspace(0, column.samples - length, stretches).astype(np.int64):
                values = cast(MappedRows, rows).take(np.arange(start, start + length))
                checksum = zlib.crc32(values.data, checksum)
    return f"{checksum:08x}"


def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Return inode, size and modification time, by which versions of a file differ; None if there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


# --- samples by index, in any order and repeatedly --------------------------------------------------------------------
class MappedRows:
    """Samples that are one array in a memory map.

    The file's length is checked before each batch. If somebody truncates the file while a batch is copied, the process
    still dies of SIGBUS, as with every memory map; `create` replaces files by a rename, which is harmless.
    """

    def __init__(self, column: Column, memory: mmap.mmap, path: Path):
        self._column, self._memory, self._path = column, memory, path
        sample = np.dtype((np.void, column.sample_bytes))  # a sample may lie at any address
        self._samples = np.frombuffer(memory, sample, column.samples, cast(int, column.offset))

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Copy the samples at `indices`; raise DataError if the file has become shorter."""
        column = self._column
        if (length := self._memory.size()) < column.end_bytes:  # the file's, not the map's
            raise damage(
                self._path,
                f"has become shorter while it was read: {column.name} reaches byte {column.end_bytes} of {length}",
                "Write it anew under another name, then rename it.",
            )
        values = self._samples.take(indices).view(column.dtype).reshape(-1, *column.shape)
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
        """Copy the samples at `indices`; raise IndexError if one is out of bounds."""
        column = self._column
        indices = np.where(indices < 0, indices + column.samples, indices)
        if ((indices < 0) | (indices >= column.samples)).any():
            raise IndexError(f"an index is out of bounds for {column.samples} samples")
        out = np.empty((len(indices), *column.shape), column.dtype.newbyteorder("="))
        order = np.argsort(indices, kind="stable")
        ordered = indices[order]
        new_chunk = np.flatnonzero(np.diff(ordered // column.chunk_samples)) + 1  # where the next chunk starts
        for positions, samples in zip(np.split(order, new_chunk), np.split(ordered, new_chunk)):
            if len(samples):
                out[positions] = self._read(samples[0], samples[-1] + 1)[samples - samples[0]]
        return out

    def _read(self, start: int, stop: int) -> np.ndarray:
        try:
            return self._dataset[start:stop]
        except (OSError, RuntimeError) as error:
            raise damage(self._path, f"is corrupt in {self._column.name}[{start}:{stop}] ({error})") from error
