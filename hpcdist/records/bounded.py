"""Read files that others may have made: regular ones of a bounded size only.

A pipe would block for ever, a device such as /dev/zero has no end, and JSON may be nested deeper than Python goes.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from hpcdist.errors import HpcdistError

MOST_BYTES = 1 << 28  # of a file of settings, of a summary or a manifest
_KINDS = {
    stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"
}  # fmt: skip


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading, at once, also where it is none that can be read.

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
    """Read a regular file of at most `limit` bytes.

    Raises:
        OSError: as for `open_regular`; or the file is larger.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
    return content


def parse_json(text: bytes | str, where: str | Path, error: type[HpcdistError], remedy: str = "") -> Any:
    """Parse JSON.

    Raises:
        HpcdistError: of the kind `error`: it is none, or nested too deep.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise error(f"{where} must be JSON; got damaged content ({reason}).{remedy and f' {remedy}'}") from None
