"""MNIST and other data sets in its IDX format (Fashion-MNIST, KMNIST...): four files, gzipped or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from hpcdist.data.importers import need_folder
from hpcdist.data.writer import Split, create
from hpcdist.errors import DataError
from hpcdist.records import open_regular

PREFIXES = {"train": "train", "test": "t10k"}
UINT8 = 0x08


def convert(
    source: str | Path, destination: str | Path, *, classes: str = "0,1,2,3,4,5,6,7,8,9", compression: str | None = None
) -> Path:
    """Write MNIST from its four files: x (1, rows, columns), stored as uint8, read as float32 in 0..1; y int64.

    Args:
        source: The folder with train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
            t10k-labels-idx1-ubyte, each as it is or with .gz.
        destination: The file to write.
        classes: The classes' names in the order of their labels, with commas between.
        compression: None, "gzip" or "lzf".

    Reference: Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, Gradient-based learning applied to document recognition,
    1998.
    """
    folder = need_folder(source, "Name the one with train-images-idx3-ubyte.gz and its three companions.")
    return create(
        destination,
        {name: _split(folder, prefix) for name, prefix in PREFIXES.items()},
        task="classification",
        source=f"IDX files {folder.name}",
        classes=classes.split(","),
        scale=1 / 255,
        compression=compression,
    )


def _split(folder: Path, prefix: str) -> Split:
    (images, of_images), (labels, of_labels) = (_read(folder, f"{prefix}-{kind}") for kind in ("images", "labels"))
    if len(images) != len(labels):
        raise DataError(
            f"{of_images} has {len(images)} images but {of_labels} has {len(labels)} labels. Take both from the same "
            "release."
        )
    return Split.of(images[:, np.newaxis], labels.astype(np.int64))


def _read(folder: Path, stem: str) -> tuple[np.ndarray, Path]:
    """Read an IDX file of unsigned bytes: 2 zero bytes, type, number of dimensions, sizes (big endian), values."""
    dimensions = 3 if stem.endswith("images") else 1
    names = [f"{stem}{dot}idx{dimensions}-ubyte{gz}" for dot in "-." for gz in ("", ".gz")]
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise DataError(f"{folder} must have one of the files {', '.join(names)}; it has none. Download it again.")
    gzipped, head_bytes = path.suffix == ".gz", 4 + 4 * dimensions
    max_bytes = path.stat().st_size * (1032 if gzipped else 1)  # gzip makes files shorter by this factor at most
    try:
        with open_regular(path) as plain, cast(BinaryIO, gzip.open(plain)) if gzipped else plain as file:
            head = file.read(head_bytes)
            shape = struct.unpack(f">{dimensions}I", head[4:].ljust(4 * dimensions, b"\xff"))
            values = file.read(min(max_bytes, math.prod(shape)) + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} must be a whole gzip file ({error}). Download it again.") from error
    magic = bytes((0, 0, UINT8, dimensions))
    if head[:4] != magic:
        raise DataError(
            f"{path} must begin with the IDX magic number {magic.hex()} (unsigned bytes, {dimensions} dimensions); got "
            f"{head[:4].hex()}. Download it again."
        )
    missing = math.prod(shape) - len(values) if len(head) == head_bytes else head_bytes - len(head)
    if missing > 0:
        raise DataError(f"{path} is truncated: {missing} bytes are missing. Download it again.")
    if missing < 0:
        raise DataError(f"{path} must end after {shape[0]} samples but goes on. Download it again.")
    return np.frombuffer(values, np.uint8).reshape(shape), path
