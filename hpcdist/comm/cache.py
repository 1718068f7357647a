"""A cache of measurements, so that each machine is measured once: small files in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path

import platformdirs
from pydantic import ValidationError

from hpcdist.comm.communicator import Communicator
from hpcdist.records import read_bounded, replacing


def cache_file(kind: str, *depends_on: object, folder: Path | None = None) -> Path:
    """Return the path of the cache file of a measurement.

    Args:
        kind: the measurement's name, the first part of the file's name.
        depends_on: values that, with the machine, identify the measurement.
        folder: by default `hpcdist` in XDG_CACHE_HOME, or in ~/.cache.
    """
    key = repr((_processor(), os.cpu_count(), *depends_on))
    folder = folder or platformdirs.user_cache_path("hpcdist", appauthor=False)
    return folder.expanduser() / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _processor() -> str:
    """Return the processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def load_or_measure(
    comm: Communicator, path: Path, check: Callable[[str], str], measure: Callable[[], str], what: str, *,
    refresh: bool = False,
) -> str:  # fmt: skip
    """Collective. Return a cached measurement, or measure and cache it; the same text on all ranks.

    Only rank 0 reads and writes the file. An invalid file is replaced, with a warning.

    Args:
        path: the file, from `cache_file`.
        check: maps the file's text to the result; an empty result means out of date. Raises ValueError if invalid.
        measure: Collective. Returns the text to cache.
        what: the measurement's name, for messages.
        refresh: measure even if there is a valid file.
    """
    text: str = comm.gather(_read(path, check, what) if comm.rank == 0 and not refresh else "")[0]
    if not text:
        text = measure()
        if comm.rank == 0:
            write_cached(path, text, f"the {what}")
    return text


def _read(path: Path, check: Callable[[str], str], what: str) -> str:
    """Return the checked text of a cache file; empty if there is none, or with a warning if it is invalid."""
    try:
        return check(read_bounded(path).decode())
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error)
    warnings.warn(f"{path} is not a {what} ({reason}); measuring again.", stacklevel=5)
    return ""


def write_cached(path: Path, text: str, what: str = "a measurement") -> None:
    """Write a cache file atomically, also if other processes write it at the same time; warn if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(text)
    except OSError as error:
        warnings.warn(
            f"{what} can't be cached in {path} ({error.strerror or error}) and will be measured again next time. Set "
            "XDG_CACHE_HOME to another folder.",
            stacklevel=2,
        )
