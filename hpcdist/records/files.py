"""Files that are complete or absent after a crash; files of others, which are read only if regular and bounded."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import xxhash
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from hpcdist.errors import DataError, HpcdistError, OutputError

T = TypeVar("T")
CHUNK_BYTES = 1 << 20
# Checksums of files, by name; the first one is written. It tells of damage at the speed of memory, and is no proof of
# who has written a file.
CHECKSUMS: dict[str, Callable[[], Any]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}
WRITTEN = next(iter(CHECKSUMS))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError within the context into OutputError for `path`."""
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
    checksum: str  # its name in CHECKSUMS, a colon, and its hexadecimal digits


def write_durably(path: Path, chunks: Iterable[bytes | np.ndarray]) -> Stamp:
    """Write chunks (bytes, or flat uint8 arrays) into a new file and fsync it.

    `chunks` may be a generator: each one is written before the next one is created, and may reuse its memory.

    Raises:
        OSError: the file exists, or can't be written.
    """
    checksum, total = CHECKSUMS[WRITTEN](), 0
    with open(path, "xb") as file:
        for chunk in chunks:
            data = chunk if isinstance(chunk, bytes) else chunk.data
            checksum.update(data)
            file.write(data)
            total += len(data)
        file.flush()
        os.fsync(file.fileno())
    return Stamp(total, f"{WRITTEN}:{checksum.hexdigest()}")


def stamp(file: BinaryIO, checksum: str = WRITTEN) -> Stamp:
    """Return the length and the checksum, of the kind that `checksum` names, of the rest of an open file."""
    digest, total, chunk = CHECKSUMS[checksum](), 0, memoryview(bytearray(CHUNK_BYTES))
    while count := file.readinto(chunk):  # type: ignore[attr-defined]
        digest.update(chunk[:count])
        total += count
    return Stamp(total, f"{checksum}:{digest.hexdigest()}")


def sync(path: Path) -> None:
    """Sync a file's content to disk, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name for a new file, which replaces `path` at the end of the context, or is removed after an error."""
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        yield temporary
        with writing(path):
            os.replace(temporary, path)
            sync(path.parent)
    finally:
        with suppress(OSError):  # such as NotADirectoryError, which would hide the error of writing
            temporary.unlink(missing_ok=True)


def replace_durably(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a crash leaves either the old file or the whole new one.

    Raises:
        OutputError: the system refuses to write; the old file is unchanged.
    """
    with writing(path), replacing(path) as temporary:
        write_durably(temporary, [data])


# --- files that others may have written -------------------------------------------------------------------------------
Count = Annotated[int, Field(ge=0, le=1 << 53)]  # in a file: what floats hold, and sums of it int64
MOST_BYTES = 1 << 28  # of a file of settings, of a summary or a manifest


def _as_path(text: str) -> str:
    if "\0" in text or any(len(os.fsencode(part)) > 255 for part in text.split("/")):
        raise ValueError("no system has a file of that name")
    return text


PathText = Annotated[str, AfterValidator(_as_path)]
_KINDS = {
    stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"
}  # fmt: skip


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading. Never blocks, as opening a pipe would.

    Raises:
        OSError: the system refuses, or the file is a folder, a pipe, a socket or a device; `strerror` says which.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, f"it is {_KINDS.get(stat.S_IFMT(mode), 'no file')}, not a regular file", str(path))


def read_bounded(path: str | Path, limit: int = MOST_BYTES) -> bytes:
    """Read a regular file of at most `limit` bytes; raise OSError if it is larger, or as `open_regular` does."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size <= limit and len(content := file.read(limit + 1)) <= limit:
            return content
    raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))


def parse_json(text: bytes | str, where: str | Path, error: type[HpcdistError]) -> Any:
    """Parse JSON; raise `error`, a subclass of HpcdistError, about `where` if it is none, or nested too deep."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise error(f"{where} must be JSON; got damaged content ({reason}).") from None


def faults_of(error: ValidationError) -> str:
    """Describe in a line the first three faults of a value that breaks a model's rules."""
    return "; ".join(
        f"{'.'.join(map(str, fault['loc'])) or 'it'}: {fault['msg']}, got {fault['input']!r:.60}"
        for fault in error.errors(include_url=False)[:3]
    )


def checked(value: Any, model: Any, where: str | Path, rule: str, remedy: str = "") -> Any:
    """Return a value as an instance of `model`, a pydantic model or a type.

    Raises:
        DataError: it breaks a rule of the model. The message: `where` must `rule`; got the faults. `remedy`
    """
    try:
        return TypeAdapter(model).validate_python(value)
    except ValidationError as error:
        raise DataError(f"{where} must {rule}; got {faults_of(error)}. {remedy}".rstrip()) from None


def read_checked(path: Path, model: Any, rule: str, remedy: str) -> Any:
    """Read a JSON file and return it as `checked` does; None if there is no file; raise DataError if it is damaged."""
    try:
        content = parse_json(read_bounded(path), path, DataError)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{path} must be readable; got {error.strerror}. {remedy}") from None
    except DataError as error:
        raise DataError(f"{path} must {rule}; got {error} {remedy}") from None
    return checked(content, model, path, rule, remedy)


def read_lines(path: Path, adapter: TypeAdapter[T], rule: str, remedy: str, *, whole: bool = False) -> list[T]:
    """Return the lines of a file, each parsed as JSON by `adapter`; [] if there is no file.

    Args:
        whole: skip a last line without a line end.

    Raises:
        DataError: the file can't be read, or the adapter refuses a line, which must be `rule`.
    """
    try:
        text, items = read_bounded(path), []
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DataError(f"{path} must be readable; got {error.strerror}. Move it away to go on.") from None
    for number, line in enumerate(text[: text.rfind(b"\n") + 1 if whole else None].splitlines(), start=1):
        try:
            items.append(adapter.validate_json(line))
        except ValidationError as error:
            raise damaged_line(path, number, line, rule, error, remedy) from None
    return items


def damaged_line(
    path: Path, number: int, line: bytes, rule: str, fault: ValidationError | str, remedy: str
) -> DataError:
    """Return the error about a line that is not what `rule` says; `fault` is the reason."""
    reason = fault if isinstance(fault, str) else faults_of(fault)
    return DataError(f"{path}:{number} must be {rule}; got {line[:60]!r} ({reason}). {remedy}")
