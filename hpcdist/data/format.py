"""hpcdist's layout of HDF5 files: open a file, check it, and find its chunks.

::

    /                     format = "hpcdist", format_version, task, source, classes (classification), further notes
    /train/x, /train/y    n samples in the first dimension of each; x may have `scale` and `offset`
    /test/x, /test/y      the same; splits may have any other names

The model trains on x * scale + offset, so that images stay uint8 on disk. `scale` and `offset` are numbers, or arrays
that broadcast against one sample.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil

from hpcdist.errors import ConfigError, DataError
from hpcdist.records import open_regular

FORMAT = "hpcdist"
VERSION = 1
TASKS = ("classification", "regression")
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")  # torch has them, too
LOCKING = (True, False, "best-effort", None)
FAULTS = (OSError, RuntimeError, LookupError, ValueError, TypeError, OverflowError, MemoryError)  # by damaged metadata
RESERVED = ("format", "format_version", "task", "source", "classes")  # attributes with a fixed meaning
OTHERS = "`hpcdist data import` makes such a file of other formats; `hpcdist datasets` lists them."
TARGET_BYTES = 512 << 10  # a chunk has 50 to 100 % of that: parallel file systems prefer few, large reads


def damage(path: str | Path, fault: str, advice: str = "Write it again.") -> DataError:
    """Return the error about a file that can't be used: damaged, missing, locked or of another layout."""
    return DataError(f"{path} {fault}. {advice}")


def require_memory(path: str | Path, n_bytes: int, content: str) -> None:
    """Raise DataError if `n_bytes` exceed this machine's memory: a file with holes may claim any size."""
    if n_bytes > (available := psutil.virtual_memory().total):
        raise damage(
            path, f"has {n_bytes} bytes of {content}, more than this machine's memory of {available}", "Divide it."
        )


@contextmanager
def named_faults(path: str | Path) -> Iterator[None]:
    """Convert errors that h5py raises on damaged data into DataError."""
    try:
        yield
    except DataError:
        raise
    except FAULTS as error:
        raise damage(path, f"is corrupt ({error})") from error


@dataclass(frozen=True)
class Column:
    """x or y of one split, as the file's header describes it."""

    name: str
    samples: int
    shape: tuple[int, ...]  # of one sample
    dtype: np.dtype  # as stored
    chunk_samples: int
    offset: int | None  # of the first sample in the file, see `array_offset`

    @property
    def sample_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end_bytes(self) -> int:
        """The end of the last sample, in bytes from the start of the file; 0 if the offset is not known."""
        return 0 if self.offset is None else self.offset + self.samples * self.sample_bytes


@dataclass(frozen=True)
class Header:
    """The header of a file and of one of its splits."""

    task: str
    source: str
    classes: tuple[str, ...]
    notes: dict
    x: Column
    y: Column
    scale: np.ndarray | None  # of x
    offset: np.ndarray | None


def open_file(path: Path, *, locking: bool | str | None = "best-effort", mpi_comm: object = None) -> h5py.File:
    """Open a file for reading; raise DataError if it is missing, locked or no HDF5. Collective with `mpi_comm`."""
    if locking not in LOCKING:
        raise ConfigError(f"locking must be one of {', '.join(map(repr, LOCKING))}; got {locking!r}.")
    try:
        open_regular(path).close()
    except OSError as error:
        raise damage(
            path, f"can't be opened ({error.strerror})", "Check the path; `hpcdist data import` makes such a file."
        ) from error
    if not h5py.is_hdf5(path):
        raise damage(path, f"is not an HDF5 file (it has {path.stat().st_size} bytes and no HDF5 signature)", OTHERS)
    parallel = {} if mpi_comm is None else {"driver": "mpio", "comm": mpi_comm}
    try:
        return h5py.File(path, "r", locking=locking, **parallel)
    except BlockingIOError as error:
        raise damage(path, f"is locked ({error})", "Wait for its writer to end, or pass locking=False.") from error
    except (OSError, RuntimeError) as error:
        if "already open for" in str(error):  # HDF5's text for a mark that a writer leaves in the file, locks or not
            advice = f"Wait for its writer to end; after one that has died: h5clear --status {path}."
            raise damage(path, f"is open for writing, in SWMR mode or without locks ({error})", advice) from error
        raise damage(path, f"is truncated or corrupt ({error})") from error


def split_names(file: h5py.File) -> list[str]:
    """List the names of all splits, training first; raise DataError if they can't be read."""
    with named_faults(file.filename):
        groups = [name for name in file if file.get(name, getclass=True) is h5py.Group]
    return sorted(groups, key=lambda name: (name != "train", name))


def read_header(file: h5py.File, split: str) -> Header:
    """Read the header of an open file; raise DataError if it breaks a rule of the layout."""
    path = file.filename
    with named_faults(path):
        attributes = {name: _plain(value) for name, value in file.attrs.items()}
        if attributes.get("format") != FORMAT:
            raise damage(path, "is HDF5 but not in hpcdist's layout (no attribute format='hpcdist')", OTHERS)
        version = attributes.get("format_version")
        if version != VERSION:
            advice = "Update hpcdist, or write it again."
            raise damage(path, f"has format version {version}, this hpcdist reads {VERSION}", advice)
        task, classes = attributes.get("task"), tuple(attributes.get("classes", ()))
        if task not in TASKS:
            raise damage(path, f"has task {task!r}, which must be one of {', '.join(TASKS)}")
        if task == "classification" and not classes:
            raise damage(path, "is for classification but names no classes")
        if split not in file:
            raise damage(path, f"has no split {split!r}", f"It has {', '.join(split_names(file)) or 'none'}.")
        x, y = (_read_column(file, path, f"{split}/{name}") for name in "xy")
        if x.samples != y.samples or x.samples == 0:
            raise damage(
                path, f"has {x.samples} samples in {x.name} but {y.samples} in {y.name}: must be equal, above 0"
            )
        if task == "classification" and (y.dtype.kind not in "iu" or y.shape != ()):
            raise damage(path, f"has labels {y.name} of dtype {y.dtype} and shape {y.shape}: must be one integer each")
        notes = {name: value for name, value in attributes.items() if name not in RESERVED}
        factors = (_read_factor(file[x.name], path, key) for key in ("scale", "offset"))
        return Header(task, attributes.get("source", ""), classes, notes, x, y, *factors)


def _read_column(file: h5py.File, path: str, name: str) -> Column:
    """Read the header of x or y of a split, such as train/x; raise DataError if it breaks a rule of the layout."""
    dataset = file[name] if name in file else None  # noqa: SIM401 (get() takes a damaged one for none)
    if not isinstance(dataset, h5py.Dataset):
        raise damage(path, f"has no dataset {name}")
    if dataset.dtype.newbyteorder("=").name not in DTYPES:
        raise damage(path, f"has dtype {dataset.dtype} in {name}, which must be one of {', '.join(DTYPES)}")
    if not dataset.ndim or 0 in dataset.shape:
        raise damage(path, f"has shape {dataset.shape} in {name}, which must be (samples, ...) with no dimension of 0")
    n_bytes = math.prod(dataset.shape[1:] if name.endswith("x") else dataset.shape) * dataset.dtype.itemsize
    require_memory(path, n_bytes, f"a sample of {name}" if name.endswith("x") else name)
    chunk_samples, offset = samples_per_chunk(dataset), array_offset(dataset)
    column = Column(name, len(dataset), dataset.shape[1:], dataset.dtype, chunk_samples, offset)
    if column.end_bytes > os.path.getsize(path):
        raise damage(path, f"is truncated: {name} should reach byte {column.end_bytes} of {os.path.getsize(path)}")
    return column


def _read_factor(dataset: h5py.Dataset, path: str, key: str) -> np.ndarray | None:
    """Return the attribute `scale` or `offset` of x; None if there is none."""
    if key not in dataset.attrs:
        return None
    factor = np.asarray(dataset.attrs[key])
    shape = dataset.shape[1:]
    fits = factor.ndim <= len(shape) and all(a in (1, b) for a, b in zip(factor.shape[::-1], shape[::-1]))
    if not fits or factor.dtype.kind not in "iuf" or not np.isfinite(factor).all():
        got = f"dtype {factor.dtype} and shape {factor.shape}"
        raise damage(path, f"has a {key} of {got}: must be finite numbers that broadcast against {shape}")
    return factor


def _plain(value: Any) -> Any:
    """Convert texts to str, lists of texts to lists of str, and NumPy's scalars to Python's."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.ndarray) and value.dtype.kind in "OS":
        return [_plain(item) for item in value.tolist()]
    return value.item() if isinstance(value, np.generic) else value


# --- chunks -----------------------------------------------------------------------------------------------------------
def preferred_chunk_samples(sample_bytes: int, samples: int) -> int:
    """Choose the number of samples per chunk, so that a chunk has 256 to 512 KiB if the samples allow it."""
    return max(1, min(samples, TARGET_BYTES // sample_bytes))


def samples_per_chunk(dataset: h5py.Dataset) -> int:
    """Return the samples of a chunk, or those of a contiguous dataset that are best read at once."""
    if dataset.chunks:
        return dataset.chunks[0]
    return preferred_chunk_samples(dataset.dtype.itemsize * math.prod(dataset.shape[1:]), len(dataset))


def array_offset(dataset: h5py.Dataset) -> int | None:
    """Return the first sample's offset in the file, in bytes, if the samples are one array there, as `create` writes.

    None if only HDF5 can read the values: they are compressed, in scattered chunks, stored elsewhere, never written...
    """
    if dataset.file.driver != "sec2" or dataset.file.userblock_size or dataset.is_virtual or dataset.external:
        return None
    if not dataset.chunks:
        return dataset.id.get_offset()
    length = dataset.chunks[0]
    count, chunk_bytes = -(-len(dataset) // length), math.prod(dataset.chunks) * dataset.dtype.itemsize
    plain = dataset.id.get_create_plist().get_nfilters() == 0 and dataset.chunks[1:] == dataset.shape[1:]
    if not plain or not hasattr(dataset.id, "chunk_iter") or dataset.id.get_num_chunks() != count:
        return None  # HDF5 before 1.12.3 can't iterate
    offsets: dict[int, int] = {}  # by number of the chunk
    dataset.id.chunk_iter(lambda chunk: offsets.update({chunk.chunk_offset[0] // length: chunk.byte_offset}))
    is_array = all(offset == offsets[0] + number * chunk_bytes for number, offset in offsets.items())
    return offsets[0] if is_array else None
