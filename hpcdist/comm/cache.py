"""Measurements that are kept, so that a machine is measured once: small files under the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs
from pydantic import ValidationError

from hpcdist.records import read_bounded

if TYPE_CHECKING:
    from hpcdist.comm.communicator import Communicator


def cache_file(kind: str, *depends_on: object, folder: Path | None = None) -> Path:
    """Name the file of a measurement that depends on this machine and on the values of `depends_on`.

    Args:
        folder: where it lies; by default in XDG_CACHE_HOME, or ~/.cache.
    """
    key = repr((_processor(), os.cpu_count(), *depends_on))
    folder = folder or platformdirs.user_cache_path("hpcdist", appauthor=False)
    return folder.expanduser() / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def measured(
    comm: Communicator, path: Path, check: Callable[[str], str], measure: Callable[[], str], what: str, *,
    refresh: bool = False,
) -> str:  # fmt: skip
    """Collective. Return a measurement from its file, or take it and write it there; the same text on all ranks.

    Rank 0 alone reads and writes. A file that can't be used is replaced, with a warning.

    Args:
        check: makes of the file's text what is returned; empty: out of date. Raises ValueError where it is not one.
        measure: Collective. Returns the text.
        what: the measurement's name, for messages.
        refresh: measure although there is a file.
    """
    text: str = comm.gather(_read(path, check, what) if comm.rank == 0 and not refresh else "")[0]
    if not text:
        text = measure()
        if comm.rank == 0:
            keep(path, text, f"the {what}")
    return text


def _read(path: Path, check: Callable[[str], str], what: str) -> str:
    try:
        return check(read_bounded(path).decode())
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error)
    warnings.warn(f"{path} is not a {what} ({reason}); measuring anew.", stacklevel=5)
    return ""


def keep(path: Path, text: str, what: str = "a measurement") -> None:
    """Write a measurement, whole or not at all, also where others write it at the same time; warn where that fails."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        warnings.warn(
            f"{what} can't be kept in {path} ({error.strerror}), and is taken anew next time. XDG_CACHE_HOME may name "
            "another folder.",
            stacklevel=2,
        )
