"""Files of hpcdist's layout whose bytes lie in every way that HDF5 knows, written with plain h5py."""

from __future__ import annotations

import io
from pathlib import Path

import h5py
import numpy as np

from hpcdist.data.format import FORMAT, VERSION
from hpcdist.data.writer import set_attribute

N = 53  # no multiple of CHUNK: the last chunk is partly empty
CHUNK = 4


def sample_data(dtype: str = "float32", shape: tuple[int, ...] = (3, 5)) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).integers(0, 100, (N, *shape)).astype(dtype)
    return x, np.arange(N) % 7


def header(file: h5py.File) -> None:
    attributes = {"format": FORMAT, "format_version": VERSION, "task": "classification", "source": "a test"}
    for name, value in {**attributes, "classes": [str(i) for i in range(7)]}.items():
        set_attribute(file, name, value)


def _late(group: h5py.Group, x: np.ndarray, order: np.ndarray) -> None:
    """Chunks allocated as they are written, in `order`, with other objects of odd length between them."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_INCR)
    dataset = group.create_dataset("x", x.shape, x.dtype, chunks=(CHUNK, *x.shape[1:]), dcpl=plist)
    for i in order:
        dataset[i * CHUNK : (i + 1) * CHUNK] = x[i * CHUNK : (i + 1) * CHUNK]
        group.file.flush()
        group.create_dataset(f"between{i}", data=np.zeros(1 + i % 3 * 5, np.uint8))


def scattered(group: h5py.Group, x: np.ndarray) -> None:
    _late(group, x, np.random.default_rng(1).permutation(-(-len(x) // CHUNK)))


def backwards(group: h5py.Group, x: np.ndarray) -> None:
    _late(group, x, np.arange(-(-len(x) // CHUNK))[::-1])


def hole(group: h5py.Group, x: np.ndarray) -> None:
    """The second chunk was never written: its values are the fill value."""
    _late(group, x, np.delete(np.arange(-(-len(x) // CHUNK)), 1))
    x[CHUNK : 2 * CHUNK] = 0


def side_by_side(group: h5py.Group, x: np.ndarray) -> None:
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    group.create_dataset("x", data=x, chunks=(CHUNK, *x.shape[1:]), dcpl=plist)


def one_chunk(group: h5py.Group, x: np.ndarray) -> None:
    group.create_dataset("x", data=x, chunks=x.shape)


def contiguous(group: h5py.Group, x: np.ndarray) -> None:
    group.create_dataset("x", data=x)


def other_byte_order(group: h5py.Group, x: np.ndarray) -> None:
    group.create_dataset("x", data=x.astype(x.dtype.newbyteorder()), chunks=(CHUNK, *x.shape[1:]))


def other_byte_order_compressed(group: h5py.Group, x: np.ndarray) -> None:
    group.create_dataset("x", data=x.astype(x.dtype.newbyteorder()), chunks=(CHUNK, *x.shape[1:]), compression="gzip")


def cut_samples(group: h5py.Group, x: np.ndarray) -> None:
    group.create_dataset("x", data=x, chunks=(CHUNK, *(1 for _ in x.shape[1:])))


def gzip(group: h5py.Group, x: np.ndarray) -> None:
    group.create_dataset("x", data=x, chunks=(CHUNK, *x.shape[1:]), compression="gzip", shuffle=True)


def lzf(group: h5py.Group, x: np.ndarray) -> None:
    group.create_dataset("x", data=x, chunks=(CHUNK, *x.shape[1:]), compression="lzf")


def compact(group: h5py.Group, x: np.ndarray) -> None:
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.COMPACT)
    group.create_dataset("x", data=x, dcpl=plist)


def resizable(group: h5py.Group, x: np.ndarray) -> None:
    dataset = group.create_dataset("x", data=x[:10], chunks=(CHUNK, *x.shape[1:]), maxshape=(None, *x.shape[1:]))
    dataset.resize(x.shape)
    dataset[10:] = x[10:]


MAPPED = [side_by_side, one_chunk, contiguous, resizable, other_byte_order]
READ = [scattered, backwards, hole, other_byte_order_compressed, cut_samples, gzip, lzf, compact]


def write_layout(path: Path, how, x: np.ndarray, y: np.ndarray, **options) -> Path:
    """A file whose train/x is written by `how`."""
    with h5py.File(path, "w", **options) as file:
        header(file)
        group = file.create_group("train")
        how(group, x)
        group["y"] = y
    return path


def hdf5_bytes() -> bytes:
    """A valid HDF5 file of another program."""
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file["anything"] = np.arange(3)
    return buffer.getvalue()
