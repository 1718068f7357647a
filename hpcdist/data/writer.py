"""Write a data set into an HDF5 file of hpcdist's layout, block by block of samples."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcdist.data.format import DTYPES, FORMAT, RESERVED, TASKS, VERSION, preferred_chunk_samples
from hpcdist.errors import ConfigError, DataError, OutputError
from hpcdist.records import replacing, sync, writing

COMPRESSIONS = (None, "gzip", "lzf")
Block = tuple[np.ndarray, np.ndarray]
LIBRARY = ("v110", "v110")  # read by HDF5 1.10 and later; indexes chunks by arrays, not trees


@dataclass(frozen=True)
class Split:
    """A split of `samples` samples, which arrive as blocks of (x, y) arrays, each block of any length above 0."""

    samples: int
    blocks: Iterable[Block]

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray) -> Split:
        """Create a split of arrays that are in memory already."""
        return cls(len(x), [(x, y)])


def create(
    path: str | Path,
    splits: Mapping[str, Split],
    *,
    task: str,
    source: str = "",
    classes: Sequence[str] = (),
    scale: float | np.ndarray | None = None,
    offset: float | np.ndarray | None = None,
    notes: Mapping[str, object] | None = None,
    chunk_samples: int | None = None,
    compression: str | None = None,
) -> Path:
    """Write `splits` to `path` and return the path; an older file stays until the new one is complete.

    Args:
        path: The file to write; missing folders are created.
        splits: "train", "test" or others, of the dtypes in `format.DTYPES`; the first block sets dtype and shape.
        task: "classification" (y: one integer per sample, an index into `classes`) or "regression".
        source: The source of the data, as text.
        classes: The classes' names, in the order of their labels.
        scale, offset: x is stored as it is and read as x * scale + offset; numbers, or arrays like one sample.
        notes: Further attributes: numbers, texts, arrays, lists of texts.
        chunk_samples: Samples of x per chunk; by default as many as fill 256 to 512 KiB.
        compression: None, "gzip" or "lzf". Compressed data are smaller and far slower to read in random order.

    Raises:
        ConfigError: an argument has a wrong value.
        DataError: the blocks are not as described.
        OutputError: the disk is full or refuses to write; the older file is unchanged.
    """
    path = Path(path)
    for name, given, choices in (("task", task, TASKS), ("compression", compression, COMPRESSIONS)):
        if given not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(map(str, choices))}; got {given!r}.")
    if chunk_samples is not None and chunk_samples < 1:
        raise ConfigError(f"chunk_samples must be at least 1; got {chunk_samples}.")
    if (task == "classification") != bool(classes):
        raise ConfigError(f"classes must be named for classification and only there; got task {task!r}, {classes!r}.")
    notes = dict(notes or {})
    if taken := notes.keys() & set(RESERVED):
        raise ConfigError(f"notes must not use the names {', '.join(RESERVED)}; got {', '.join(taken)}.")
    with _new_file(path) as (file, check):
        header = {"format": FORMAT, "format_version": VERSION, "task": task, "source": source}
        for name, value in {**header, **({"classes": list(classes)} if classes else {}), **notes}.items():
            set_attribute(file, name, value)
        for name, split in splits.items():
            x = _write(file.create_group(name), split, len(classes), chunk_samples, compression, check)
            for key, factor in (("scale", scale), ("offset", offset)):
                if factor is not None:
                    x.attrs[key] = factor
    return path


def set_attribute(file: h5py.File, name: str, value: object) -> None:
    """Store an attribute: numbers, arrays, a text or a list of texts.

    Texts get a fixed length, because HDF5 keeps texts of variable length in its global heap. That has no checksum, and
    one damaged byte in it can cause HDF5 to loop for ever.
    """
    texts = np.asarray(value)
    if texts.dtype.kind != "U":
        file.attrs[name] = value
        return
    encoded = np.char.encode(texts, "utf-8")
    file.attrs.create(name, encoded, dtype=h5py.string_dtype("utf-8", max(1, encoded.dtype.itemsize)))


class _Disk(io.FileIO):
    """A file for HDF5, which may crash on failed writes: they are hidden from it, and `check` raises them."""

    _failure: OSError | None = None

    def check(self, path: Path, planned: int = 0) -> None:
        """Raise OutputError for `path` if a write has failed, or if the disk has no room for `planned` more bytes."""
        disk = os.fstatvfs(self.fileno()) if planned else None
        if disk and 0 < disk.f_bavail * disk.f_frsize < planned:
            self._failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._failure is not None:
            raise OutputError.of(path, self._failure)

    def write(self, data: Any) -> int:
        """Write all of `data`, and pretend success in any case: `check` raises the error."""
        rest = memoryview(data).cast("B")
        while rest and self._failure is None:
            try:
                rest = rest[super().write(rest) :]
            except OSError as error:
                self._failure = error
        return memoryview(data).nbytes

    def truncate(self, size: int | None = None) -> int:
        if self._failure is None:
            try:
                return super().truncate(size)
            except OSError as error:
                self._failure = error
        return size or 0


@contextmanager
def _new_file(path: Path) -> Iterator[tuple[h5py.File, Callable[..., None]]]:
    """Yield a new HDF5 file that replaces `path` when it is complete and on disk, and `_Disk.check` for `path`."""
    with replacing(path) as temporary:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            disk = _Disk(temporary, "x+")
        with disk:
            with h5py.File(disk, "w", libver=LIBRARY, rdcc_nbytes=16 << 20) as file:
                yield file, partial(disk.check, path)
            disk.check(path)
        with writing(path):
            sync(temporary)


def _write(
    group: h5py.Group,
    split: Split,
    n_classes: int,
    chunk_samples: int | None,
    compression: str | None,
    check: Callable[..., None],
) -> h5py.Dataset:
    """Write the blocks of one split and return its x, as stored; `check` is `_Disk.check`."""
    blocks = iter(split.blocks)
    first = next(blocks, None)
    if first is None:
        raise DataError(f"{group.name} must have at least 1 sample; got none.")
    x, y = (np.asarray(values) for values in first)
    stored_x = _dataset(group, "x", split.samples, x, chunk_samples, compression)
    stored_y = _dataset(group, "y", split.samples, y, None, compression)
    check(0 if compression else stored_x.nbytes + stored_y.nbytes)
    written = 0
    for block in chain([(x, y)], blocks):
        x, y = (np.asarray(values) for values in block)
        _check(group.name, x, y, stored_x, stored_y, n_classes)
        if written + len(x) <= split.samples:
            stored_x[written : written + len(x)], stored_y[written : written + len(x)] = x, y
            check()
        written += len(x)
    if written != split.samples:
        raise DataError(f"{group.name} must have the {split.samples} samples that were announced; got {written}.")
    return stored_x


def _check(
    name: str, x: np.ndarray, y: np.ndarray, stored_x: h5py.Dataset, stored_y: h5py.Dataset, n_classes: int
) -> None:
    """Check that a block has the shapes and dtypes of the first block, and labels that are classes."""
    for values, stored in ((x, stored_x), (y, stored_y)):
        if values.shape[1:] != stored.shape[1:] or values.dtype != stored.dtype:
            raise DataError(
                f"{stored.name} must have samples of shape {stored.shape[1:]} and dtype {stored.dtype} throughout; "
                f"got {values.shape[1:]} and {values.dtype}."
            )
    if len(x) != len(y):
        raise DataError(f"{name} must have as many y as x; got {len(y)} and {len(x)}.")
    if n_classes and len(y) and (y.ndim != 1 or y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= n_classes):
        raise DataError(
            f"{name}/y must be labels, one integer in 0..{n_classes - 1} per sample; "
            f"got {y.dtype} of shape {y.shape}, {y.min()} to {y.max()}."
        )


def _dataset(
    group: h5py.Group, name: str, samples: int, template: np.ndarray, chunk_samples: int | None, compression: str | None
) -> h5py.Dataset:
    """Create x or y of a split for `samples` samples like those of `template`, its first block."""
    if (
        template.dtype.newbyteorder("=").name not in DTYPES
        or not template.ndim
        or 0 in template.shape[1:]
        or samples < 1
    ):
        raise DataError(
            f"{group.name}/{name} must be of {', '.join(DTYPES)} and of shape (samples, ...) with at least 1 of each; "
            f"got {template.dtype} of shape {(samples, *template.shape[1:])}."
        )
    sample_bytes = template.dtype.itemsize * int(np.prod(template.shape[1:]))
    chunk_samples = min(chunk_samples or preferred_chunk_samples(sample_bytes, samples), samples)
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)  # every sample is written, so filling first would be waste
    if compression is None:
        layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)  # all chunks side by side: read as one array
    return group.create_dataset(
        name,
        (samples, *template.shape[1:]),
        template.dtype,
        chunks=(chunk_samples, *template.shape[1:]),
        compression=compression,
        shuffle=compression is not None,
        dcpl=layout,
    )
