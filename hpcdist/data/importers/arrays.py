"""Named arrays of a file: HDF5 of other layouts than hpcdist's, MATLAB's .mat, NumPy's .npz."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcdist.data.format import DTYPES, named_faults, open_file, require_memory
from hpcdist.data.importers import as_targets, padded, random_splits
from hpcdist.data.writer import Split, create
from hpcdist.errors import ConfigError, DataError
from hpcdist.records import open_regular

BLOCK_BYTES = 4 << 20  # of x held in memory at once
TRAIN = ("{}_train", "train_{}", "train/{}", "{}/train", "{}")  # what x and y for training may be called
TESTS = ("test", "valid", "val")  # in place of `train`
WIDER = {"bool": "uint8", "uint16": "int32", "uint32": "int64", "uint64": "int64"}  # of dtypes that files don't have
FLOATS = ("float32", "float64")
PIXELS = ("uint16", "uint8")  # the first of images only: others may be tokens


@dataclass(frozen=True)
class NamedArray:
    """An array of a file, or the `field` of a compound type, with the dimensions that the file's own tools show."""

    path: Path
    name: str
    stored: Any
    field: str | None = None
    reverse: bool = False  # the dimensions are stored in reverse order, as MATLAB does

    @property
    def _dtype(self) -> np.dtype:
        return self.stored.dtype if self.field is None else self.stored.dtype[self.field]

    @property
    def dtype(self) -> np.dtype:
        return h5py.check_vlen_dtype(self._dtype) or self._dtype.base

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.stored.shape + (() if self.field is None else self._dtype.shape)
        return shape[::-1] if self.reverse else shape

    def read(self, axis: int = 0, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read from `start` to `stop` along an axis. Samples of variable length are read as an array of arrays."""
        place = [slice(None)] * self.stored.ndim
        place[-1 - axis if self.reverse else axis] = slice(start, stop)
        with named_faults(self.path):
            values = self.stored[tuple(place)]
        values = values if self.field is None else values[self.field]
        return values.T if self.reverse else values

    def longest(self, axis: int) -> int:
        """Return the length of the longest sample if lengths vary; 0 if all samples have one shape."""
        return max(map(len, self.read(axis).reshape(-1))) if h5py.check_vlen_dtype(self._dtype) else 0

    def __str__(self) -> str:
        return f"{self.name} {self.shape} {self.dtype}"


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    x: str = "x",
    y: str = "y",
    layout: str = "",
    task: str = "",
    classes: str = "",
    scale: float = 0.0,
    dtype: str = "float32",
    test_fraction: float = 0.2,
    seed: int = 0,
    compression: str | None = None,
) -> Path:
    """Write the arrays x and y of a file. Samples of variable length are padded with zeros to the longest.

    Labels are whole numbers of any value, words, or rows of a single 1 among zeros; they become int64.

    Args:
        source: An HDF5 file, a .mat file of MATLAB's, or a .npz file.
        destination: The file to write.
        x, y: The names of the arrays, in upper or lower case. Of those for training the names x_train, train_x,
            train/x, x/train and x are tried; those for testing have test, valid or val in place of train. ARRAY/FIELD
            is a field of a compound type or of a struct of MATLAB's, FILE:ARRAY an array of another file.
        layout: The dimensions of x, a letter each, such as NHWC for N samples and C channels, which are written as
            NCHW. NHW gets one channel. By default all dimensions stay as they are.
        task: "classification" or "regression"; by default integers and words are labels. It must be given where targets
            are whole numbers of a floating-point type.
        classes: The classes' names in the order of their labels, with commas between; words are numbered in this order.
            By default the labels.
        scale: Factor of x when it is read; 0 is 1/255 for unsigned bytes, 1/65535 for images, by their layout, of 16
            bits, and none for others.
        dtype: "float32" or "float64", for floating-point arrays.
        test_fraction: Part of the samples that is kept for testing, where no arrays are for that.
        seed: Seed of the choice of test samples.
        compression: None, "gzip" or "lzf".
    """
    if dtype not in FLOATS:
        raise ConfigError(f"dtype must be one of {', '.join(FLOATS)}; got {dtype!r}.")
    with ExitStack() as stack:
        pairs = _pairs(Path(source), x, y, stack)
        first, target = pairs["train"]
        axes, not_images = _axes(layout.upper(), first), not {*"HW"} <= {*layout.upper()}
        targets = [_native(values.reshape(-1) if values.size == max(values.shape) else values, dtype)
                   for values in (pair[1].read() for pair in pairs.values())]  # fmt: skip
        labels, names = as_targets(task, f"{target} of {source}", targets, classes.split(",") if classes else ())
        for (samples, own), count in zip(pairs.values(), map(len, labels), strict=True):
            if samples.shape[axes[0]] != count:
                raise DataError(
                    f"x and y must have as many samples; got {samples} and {own} of {source}. If x counts samples in "
                    "another dimension, say which by layout, such as layout=HWCN."
                )
        longest = max(samples.longest(axes[0]) for samples, _ in pairs.values())

        def split(samples: NamedArray, y: np.ndarray, own: np.ndarray) -> Split:
            blocks = _blocks(samples, axes, own, longest)
            native = ((_native(block[:, np.newaxis] if {*layout.upper()} == {*"NHW"} else block, dtype), y[places])
                      for block, places in blocks)  # fmt: skip
            return Split(len(own), native)

        if len(pairs) > 1:
            splits = {name: split(pairs[name][0], y, np.arange(len(y))) for name, y in zip(pairs, labels)}
        else:
            drawn = random_splits(len(labels[0]), test_fraction, seed, labels[0] if names else None)
            splits = {name: split(first, labels[0], own) for name, own in drawn.items()}
        return create(
            destination,
            splits,
            task="classification" if names else "regression",
            source=f"arrays {Path(source).name}",
            classes=names,
            scale=scale or (1 / np.iinfo(first.dtype).max if first.dtype.name in PIXELS[not_images:] else None),
            notes={"test_fraction": test_fraction, "seed": seed} if len(pairs) == 1 else {},
            compression=compression,
        )


def _axes(layout: str, x: NamedArray) -> list[int]:
    """Return the axes of x as they are written: samples, channels, others; by default all stay."""
    order = layout or "N" + "?" * (len(x.shape) - 1)
    if len(order) != len(x.shape) or (layout and ("N" not in layout or len({*layout}) != len(layout))):
        raise ConfigError(
            f"layout must be one letter for each dimension of x, with N for samples and C for channels; got {layout!r} "
            f"for {x}. NHWC and NCHW are usual."
        )
    return sorted(range(len(order)), key=lambda axis: "NC".find(order[axis]) % 3)  # N: 0, C: 1, others: 2, in order


def _blocks(
    x: NamedArray, axes: Sequence[int], own: np.ndarray, longest: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield blocks of the samples `own` (ascending), padded to `longest` unless that is 0, each with its indices."""
    count = x.shape[axes[0]]
    block_size = max(1, BLOCK_BYTES * count // max(1, math.prod(x.shape) * x.dtype.itemsize * max(1, longest)))
    for start in range(0, count, block_size):
        indices = own[np.searchsorted(own, start) : np.searchsorted(own, start + block_size)]
        if len(indices):
            block = x.read(axes[0], start, start + block_size)
            if block.dtype.kind == "f" and not np.isfinite(block).all():
                bad = np.nonzero(~np.isfinite(np.moveaxis(block, axes[0], 0)))[0][0]
                raise DataError(
                    f"x must have finite numbers; got another in sample {start + bad} of {x} of {x.path}. Remove it."
                )
            yield (padded(list(block), longest) if longest else block.transpose(axes))[indices - start], indices


def _native(values: np.ndarray, dtype: str) -> np.ndarray:
    """Convert to a dtype that data files have: floats to `dtype`, others to the next wider one."""
    if values.dtype.kind == "f":
        return values.astype(dtype)
    name = values.dtype.newbyteorder("=").name
    return values.astype(WIDER.get(name, name)) if name in WIDER or name in DTYPES else values


# --- the arrays of a file ---------------------------------------------------------------------------------------------
def _pairs(source: Path, x: str, y: str, stack: ExitStack) -> dict[str, tuple[NamedArray, NamedArray]]:
    """Return x and y of each split, the one for training first; `stack` closes the files."""
    files: dict[Path, dict[str, NamedArray]] = {}

    def find(name: str) -> NamedArray | None:
        file, _, array = name.rpartition(":")
        path = Path(file) if file else source
        if file and not path.exists():
            return None
        if path not in files:
            files[path] = {found.name.lower(): found for found in _arrays(path, stack)}
        return files[path].get(array.strip("/").lower())

    for pattern in TRAIN:
        names = [pattern.format(name) if ":" not in name else name for name in (x, y)]
        train_arrays = [find(name) for name in names]
        if train_arrays[0] is not None and train_arrays[1] is not None:
            break
    else:
        missing = next(name for name, found in zip((x, y), train_arrays, strict=True) if found is None)
        known = "; ".join(str(array) for path in files.values() for array in path.values())
        raise ConfigError(
            f"x and y must be the names of arrays, or FILE:ARRAY; got {missing}, and there are {known or 'none'}."
        )
    pairs = {"train": (train_arrays[0], train_arrays[1])}
    for other in TESTS if all("train" in name.lower() for name in names) else ():
        test_arrays = [find(name.lower().replace("train", other) if ":" not in name else name.replace("train", other))
                for name in names]  # fmt: skip
        if test_arrays[0] is not None and test_arrays[1] is not None:
            pairs["test" if "test" not in pairs else other] = (test_arrays[0], test_arrays[1])
    return pairs


def _arrays(path: Path, stack: ExitStack) -> Iterator[NamedArray]:
    """List the arrays of a file."""
    if not path.exists():
        raise DataError(f"{path} must be an HDF5, .mat or .npz file; there is no such file. Check the path.")
    if path.suffix == ".npz" or (path.suffix == ".mat" and not h5py.is_hdf5(path)):
        yield from (NamedArray(path, name, values) for name, values in loaded(path).items() if values.ndim)
        return
    file = stack.enter_context(open_file(path))
    matlab = path.suffix == ".mat"
    found: list[tuple[str, h5py.Dataset]] = []
    with named_faults(path):
        file.visititems(lambda name, node: found.append((name, node)) if isinstance(node, h5py.Dataset) else None)
    for name, values in found:
        # MATLAB's arrays of structs and cells are references to what is in #refs#.
        refers = h5py.check_ref_dtype(values.dtype) is not None
        if values.shape is not None and values.ndim and not refers and not name.startswith("#"):  # MATLAB's own
            fields = values.dtype.names
            yield from (NamedArray(path, f"{name}/{f}", values, f) for f in fields or ())
            if not fields:
                yield NamedArray(path, name, values, reverse=matlab)


def _fields(name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, values) of a variable of MATLAB's, or of the fields of a struct; nothing of an array of structs."""
    if not values.dtype.names:
        yield name, values
    elif values.size == 1:
        for field in values.dtype.names:
            yield from _fields(f"{name}/{field}", np.asarray(values[field].item()))


def loaded(path: Path) -> dict[str, np.ndarray]:
    """Load the arrays of a .npz or .mat file by their names; that of a .npy file as `table`."""
    try:
        with open_regular(path) as file:
            if path.suffix == ".mat":
                from scipy.io import loadmat

                own = {name: values for name, values in loadmat(file).items() if not name.startswith("__")}
                return dict(found for name, values in own.items() for found in _fields(name, values))
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return {"table": found}
            require_memory(path, sum(member.file_size for member in found.zip.infolist()), "arrays")
            return dict(found)
    except DataError:
        raise
    except Exception as error:  # whatever the readers of archives, of headers and of zlib's streams raise
        raise DataError(f"{path} must be a {path.suffix} file of numbers ({error}). Save it again.") from error
