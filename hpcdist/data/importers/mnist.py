"""MNIST and other data sets in its IDX format (Fashion-MNIST, KMNIST...): four files, gzipped or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from hpcdist.data.importers import need_folder
from hpcdist.data.writer import Block, Split, create
from hpcdist.errors import DataError
from hpcdist.records import open_regular

PREFIXES = {"train": "train", "test": "t10k"}
UINT8 = 0x08
MAX_SIDE = 4096  # pixels; more is damage, which must not become a request for terabytes
BLOCK_BYTES = 4 << 20  # of images held in memory at once


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    classes: str = "0,1,2,3,4,5,6,7,8,9",
    compression: str | None = None,
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
    with ExitStack() as stack:
        return create(
            destination,
            {name: _split(folder, prefix, stack) for name, prefix in PREFIXES.items()},
            task="classification",
            source=f"IDX files {folder.name}",
            classes=classes.split(","),
            scale=1 / 255,
            compression=compression,
        )


def _split(folder: Path, prefix: str, stack: ExitStack) -> Split:
    images, labels = IdxFile(folder, f"{prefix}-images", 3, stack), IdxFile(folder, f"{prefix}-labels", 1, stack)
    if images.shape[0] != labels.shape[0]:
        raise DataError(
            f"{images.path} has {images.shape[0]} images but {labels.path} has {labels.shape[0]} labels. "
            "Take both from the same release."
        )
    return Split(images.shape[0], _blocks(images, labels))


def _blocks(images: IdxFile, labels: IdxFile) -> Iterator[Block]:
    block = max(1, BLOCK_BYTES // math.prod(images.shape[1:]))
    for start in range(0, images.shape[0], block):
        count = min(block, images.shape[0] - start)
        yield images.read(count)[:, np.newaxis], labels.read(count).astype(np.int64)
    images.check_end()
    labels.check_end()


class IdxFile:
    """An IDX file of unsigned bytes: 2 zero bytes, type, number of dimensions, sizes (big endian), values."""

    def __init__(self, folder: Path, stem: str, dimensions: int, stack: ExitStack):
        names = [f"{stem}{dot}idx{dimensions}-ubyte{gz}" for dot in "-." for gz in ("", ".gz")]
        self.path = next((folder / name for name in names if (folder / name).is_file()), folder / names[0])
        if not self.path.is_file():
            raise DataError(f"{folder} must have one of the files {', '.join(names)}; it has none. Download it again.")
        plain = stack.enter_context(open_regular(self.path))
        packed = self.path.suffix == ".gz"
        self._file = stack.enter_context(cast(BinaryIO, gzip.open(plain))) if packed else plain
        magic = self._bytes(4)
        if magic != bytes((0, 0, UINT8, dimensions)):
            raise DataError(
                f"{self.path} must begin with the IDX magic number 0000{UINT8:02x}{dimensions:02x} "
                f"(unsigned bytes, {dimensions} dimensions); got {magic.hex()}. Download it again."
            )
        self.shape = struct.unpack(f">{dimensions}I", self._bytes(4 * dimensions))
        if 0 in self.shape or max(self.shape[1:], default=1) > MAX_SIDE:
            raise DataError(
                f"{self.path} must have at least 1 sample, and rows and columns in 1..{MAX_SIDE}; "
                f"got {self.shape}. Download it again."
            )
        self._check_length(self.path.stat().st_size, 4 + 4 * dimensions + math.prod(self.shape), packed)

    def _check_length(self, stored: int, content: int, packed: bool) -> None:
        """Refuse a file of another length than its header says, before anything of that length is made or read.

        gzip makes files shorter by a factor of at most 1032, and longer by less than a thousandth and its header.
        """
        if content > stored * (1032 if packed else 1):
            raise DataError(f"{self.path} is truncated: {content - stored} bytes are missing. Download it again.")
        if stored > content + packed * (content // 1000 + 1000):
            raise DataError(f"{self.path} must end after {self.shape[0]} samples but goes on. Download it again.")

    def read(self, count: int) -> np.ndarray:
        """Read the next `count` samples: uint8 (count, *shape of a sample)."""
        sample = self.shape[1:]
        return np.frombuffer(self._bytes(count * math.prod(sample)), np.uint8).reshape(count, *sample)

    def check_end(self) -> None:
        """Raise DataError if anything follows the last sample."""
        if self._read(1):
            raise DataError(f"{self.path} must end after {self.shape[0]} samples but goes on. Download it again.")

    def _bytes(self, count: int) -> bytes:
        data = self._read(count)
        if len(data) < count:
            raise DataError(f"{self.path} is truncated: {count - len(data)} bytes are missing. Download it again.")
        return data

    def _read(self, count: int) -> bytes:
        try:
            return self._file.read(count)
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"{self.path} must be a whole gzip file ({error}). Download it again.") from error
