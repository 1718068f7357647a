"""Describe a data file: its splits, types, chunks, classes and ranges."""

from __future__ import annotations

import math
from pathlib import Path

import h5py
import numpy as np

from hpcdist.data.format import VERSION, damage, named_faults, open_file, split_names
from hpcdist.data.hdf5 import HDF5Dataset

SAMPLED_BYTES = 1 << 28  # of samples, at most
SAMPLED = 1024  # evenly spaced samples for the statistics of x


def describe(path: str | Path) -> dict:
    """Describe a data file in plain Python values, ready for JSON.

    Keys: path, bytes, format_version, task, source, classes, notes, splits. A split has `samples`, `mapped`, `x` and
    `y`; these have dtype (as stored), shape, loaded_dtype, chunk_samples, chunk_bytes, compression, and min, max and
    mean as loaded (of x over at most 1024 samples, of y over all). Classification adds `counts` per class.

    Raises:
        DataError: as `HDF5Dataset`.
    """
    path = Path(path)
    with open_file(path) as file, named_faults(path):
        names = split_names(file) or ["train"]  # HDF5Dataset raises if there is no split
        splits = {name: _describe_split(path, name, file) for name in names}
    with HDF5Dataset(path, names[0]) as dataset:
        return {
            "path": str(path),
            "bytes": path.stat().st_size,
            "format_version": VERSION,
            "task": dataset.task,
            "source": dataset.source,
            "classes": list(dataset.classes),
            "notes": {name: getattr(value, "tolist", lambda v=value: v)() for name, value in dataset.notes.items()},
            "splits": splits,
        }


def _describe_split(path: Path, name: str, file: h5py.File) -> dict:
    with HDF5Dataset(path, name) as dataset:
        n = len(dataset)
        count = min(n, SAMPLED, max(1, SAMPLED_BYTES // (dataset.x_dtype.itemsize * math.prod(dataset.x_shape))))
        x, _ = dataset.batch(np.linspace(0, n - 1, count).astype(np.int64))
        y = file[name]["y"][:]
        split = {
            "samples": n,
            "mapped": dataset.mapped,
            "x": _describe_array(file[name]["x"], x.numpy()),
            "y": _describe_array(file[name]["y"], y),
        }
        if dataset.classes:
            split["counts"] = _count(path, name, dataset.classes, y)
        return split


def _count(path: Path, name: str, classes: tuple[str, ...], y: np.ndarray) -> dict[str, int]:
    if y.min() < 0 or y.max() >= len(classes):
        raise damage(path, f"has labels {y.min()} to {y.max()} in {name}/y but {len(classes)} classes")
    return dict(zip(classes, np.bincount(y, minlength=len(classes)).tolist()))


def _describe_array(stored: h5py.Dataset, loaded: np.ndarray) -> dict:
    return {
        "dtype": stored.dtype.name,
        "shape": list(stored.shape[1:]),
        "loaded_dtype": loaded.dtype.name,
        "chunk_samples": stored.chunks[0] if stored.chunks else None,
        "chunk_bytes": int(np.prod(stored.chunks)) * stored.dtype.itemsize if stored.chunks else None,
        "compression": stored.compression,
        "min": float(loaded.min()),
        "max": float(loaded.max()),
        "mean": float(loaded.mean(dtype=np.float64)),
    }
