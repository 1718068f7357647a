"""Files that are complete or absent after a crash, with a checksum of their content."""

from __future__ import annotations

import hashlib
import io
import os
import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from hpcdist.errors import OutputError

CHUNK_BYTES = 1 << 20
ASIDE_BYTES = 1 << 16  # smaller pieces are hashed faster here than by another thread


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError within the context into OutputError for `path`."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError.of(path, error) from None


def append(file: io.FileIO, path: Path, data: bytes) -> None:
    """Append all of `data`, or nothing, to a file that is open for appending without a buffer.

    Raises:
        OutputError: the system refuses to write; the file is closed.
    """
    end, rest = file.seek(0, os.SEEK_END), memoryview(data)
    try:
        with writing(path):
            while rest:
                rest = rest[file.write(rest) :]
    except OutputError:
        file.truncate(end)  # an incomplete line would damage the next one
        file.close()
        raise


class Stamp(NamedTuple):
    """The length and the checksum of a file."""

    bytes: int
    sha256: str


def write_durably(path: Path, pieces: Iterable[bytes | np.ndarray]) -> Stamp:
    """Write pieces (bytes, or flat uint8 arrays) into a new file and fsync it.

    `pieces` may be a generator: each piece is written before the next one is made.

    Raises:
        OSError: the file exists, or can't be written.
    """
    sha, total = hashlib.sha256(), 0
    with (
        open(path, "xb") as file,
        ThreadPoolExecutor(1) as hasher,
    ):  # hashing takes as long as writing
        for piece in pieces:
            hashing = hasher.submit(sha.update, piece) if len(piece) >= ASIDE_BYTES else None
            file.write(piece)
            hashing.result() if hashing else sha.update(piece)
            total += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return Stamp(total, sha.hexdigest())


def stamp(file: BinaryIO) -> Stamp:
    """Compute the length and the checksum of what is left of an open file."""
    sha, total = hashlib.sha256(), 0
    while chunk := file.read(CHUNK_BYTES):
        sha.update(chunk)
        total += len(chunk)
    return Stamp(total, sha.hexdigest())


def sync(path: Path) -> None:
    """Make a file's content durable, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a crash leaves either the old file or the whole new one.

    Raises:
        OutputError: the system refuses to write; the old file is unchanged.
    """
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    with writing(path):
        try:
            write_durably(temporary, [data])
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)
