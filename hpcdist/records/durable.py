"""Files that are whole or absent after a crash, with the checksum of what was written."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

CHUNK_BYTES = 1 << 20


class Stamp(NamedTuple):
    """Length and checksum of a file."""

    bytes: int
    sha256: str


def write_durably(path: Path, pieces: Iterable[bytes | np.ndarray]) -> Stamp:
    """Writes the pieces (bytes, or flat uint8 arrays) one after the other into a new file and fsyncs it.

    `pieces` may be a generator: each one is hashed and written before the next is asked for.

    Raises:
        OSError: the file exists, or can't be written.
    """
    sha, total = hashlib.sha256(), 0
    with open(path, "xb") as file, ThreadPoolExecutor(1) as hasher:  # hashing takes as long as writing to a page cache
        for piece in pieces:
            hashing = hasher.submit(sha.update, piece)
            file.write(piece)
            hashing.result()
            total += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return Stamp(total, sha.hexdigest())


def stamp(path: Path) -> Stamp:
    """Length and checksum of an existing file, read in pieces."""
    sha, total = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            sha.update(chunk)
            total += len(chunk)
    return Stamp(total, sha.hexdigest())


def sync(path: Path) -> None:
    """Makes a file's content, or a folder's entries (files made, renamed, removed), durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(path: Path, data: bytes) -> None:
    """Writes `data` to `path` so that a crash leaves either what was there before or all of it."""
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        write_durably(temporary, [data])
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
