"""CIFAR-10 from its binary version: records of one label byte and 3072 pixel bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hpcdist.data.importers import need_folder
from hpcdist.data.writer import Split, create
from hpcdist.errors import DataError
from hpcdist.records import read_bounded

SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ADVICE = "Unpack cifar-10-binary.tar.gz (the binary version) again and name its folder."


def convert(source: str | Path, destination: str | Path, *, compression: str | None = None) -> Path:
    """Write CIFAR-10 from its binary files: x (3, 32, 32), stored as uint8, read as float32 in 0..1; y int64.

    Args:
        source: The folder with data_batch_1.bin and so on (as many as there are) and test_batch.bin.
        destination: The file to write.
        compression: None, "gzip" or "lzf".

    Reference: A. Krizhevsky, Learning multiple layers of features from tiny images, 2009.
    """
    folder = need_folder(source, ADVICE)
    files = {"train": sorted(folder.glob("data_batch_*.bin")), "test": sorted(folder.glob("test_batch.bin"))}
    for name, pattern in (("train", "data_batch_*.bin"), ("test", "test_batch.bin")):
        if not files[name]:
            raise DataError(f"{folder} must have the file {pattern}; it has none. {ADVICE}")
    splits = {name: np.concatenate([_read(path) for path in paths]) for name, paths in files.items()}
    return create(
        destination,
        {name: Split.of(rows[:, 1:].reshape(-1, *SHAPE), rows[:, 0].astype(np.int64)) for name, rows in splits.items()},
        task="classification",
        source=f"CIFAR-10, binary version, {sum(map(len, files.values()))} files",
        classes=CLASSES,
        scale=1 / 255,
        compression=compression,
    )


def _read(path: Path) -> np.ndarray:
    """Return a file's records, shape (records, RECORD_BYTES)."""
    try:
        data = np.frombuffer(read_bounded(path), np.uint8)
    except OSError as error:
        raise DataError(f"{path} must be readable; got {error.strerror}. {ADVICE}") from None
    if not data.size or data.size % RECORD_BYTES:
        raise DataError(
            f"{path} must have a whole number of records of {RECORD_BYTES} bytes, at least 1; got {data.size} bytes. "
            + ADVICE
        )
    records = data.reshape(-1, RECORD_BYTES)
    if records[:, 0].max() >= len(CLASSES):
        raise DataError(f"{path} must have labels in 0..9; got {records[:, 0].max()}. {ADVICE}")
    return records
