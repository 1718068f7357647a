"""A lock on a run's folder: one process holds it, until that process ends or is killed."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from hpcdist.errors import ConfigError
from hpcdist.records.files import open_regular

FILE_NAME = ".lock"
RETRY_S = 0.2
WRITTEN = ("run.json", "summary.json", "evaluations.jsonl")  # files that only the run's processes replace
RELEASED_S, KILLED_S, ELSEWHERE_S = 2.0, 30.0, 300.0  # see is_abandoned
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # the file system has no locks
_HOLDER = re.compile(r"process (\d+) on host (\S+) since .+")


@contextmanager
def locked(folder: Path, wait_s: float = 0.0, setting: str = "--output") -> Iterator[None]:
    """Create the folder, and hold its lock within the context, as the file `.lock` says; the kernel unlocks it.

    Other nodes see the lock if the shared file system has a common `flock` (NFS, GPFS, BeeGFS, some mounts of Lustre).
    Without `flock`, only a live holder on this host is noticed.

    Args:
        wait_s: seconds to wait for a holder that is ending.
        setting: that names the folder, for messages.

    Raises:
        ConfigError: another process holds it; or the folder can't be created or locked.
    """
    with ExitStack() as until_the_end:
        with making(folder, setting):
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(folder / FILE_NAME, os.O_RDWR | os.O_CREAT, 0o666)
            until_the_end.callback(os.close, file)
            if not _acquired(file, wait_s):
                raise ConfigError(
                    f"{setting} must be a folder in which no other run is at work; got {folder}, held by "
                    f"{_read(file)}. Wait until that ends, or give another folder."
                )
            for stale in [path for name in WRITTEN for path in folder.glob(f"{name}.tmp-*")]:
                stale.unlink(missing_ok=True)  # of a process that was killed while it replaced the file
            since = time.strftime("%Y-%m-%d %H:%M:%S %z")
            _write(file, f"process {os.getpid()} on host {platform.node()} since {since}")
            until_the_end.callback(_write, file, "")
        yield


@contextmanager
def making(folder: Path, setting: str = "--output") -> Iterator[None]:
    """Convert an OSError within the context into ConfigError for the folder that a setting names."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{setting} must be a folder that can be made; got {error.filename or folder} ({error.strerror}). Give "
            "another one."
        ) from None


def is_abandoned(folder: Path, quiet_s: float) -> bool:
    """Return whether a process has worked in the folder and none does now. Reads only.

    A holder that ends removes its name from the file. A holder that was killed does not, nor does a dead rank whose run
    continues. Then the run's files must not have changed for a while; longer if the holder was on another host, whose
    lock may be invisible here.

    Args:
        quiet_s: seconds since the last write to the folder.
    """
    with suppress(OSError), open_regular(folder / FILE_NAME) as lock:
        file = lock.fileno()
        holder = _read(file)
        match = _HOLDER.fullmatch(holder)
        here = match is not None and match[2] == platform.node()
        patience_s = RELEASED_S if match is None else KILLED_S if here else ELSEWHERE_S
        if quiet_s < patience_s:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file releases it
        except OSError as error:
            return error.errno in _NO_LOCKS and (match is None or (here and not _holder_lives(holder)))
        return True
    return False  # nobody has ever worked there, or the file can't be read


def ended_holder(folder: Path) -> str | None:
    """Return the process that is named in the folder's lock if it ran on this host and has ended; else None."""
    with suppress(OSError), open_regular(folder / FILE_NAME) as lock:
        holder = _read(lock.fileno())
        match = _HOLDER.fullmatch(holder)
        return holder if match and match[2] == platform.node() and not _holder_lives(holder) else None
    return None


def _acquired(file: int, wait_s: float) -> bool:
    """Try to lock the file for `wait_s`; without locks in the file system, return whether no live holder is known."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return not _holder_lives(_read(file))
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        if time.monotonic() > deadline_s:
            return False
        time.sleep(RETRY_S)


def _holder_lives(text: str) -> bool:
    match = _HOLDER.fullmatch(text)
    return match is not None and match[2] == platform.node() and psutil.pid_exists(int(match[1]))


def _read(file: int) -> str:
    return os.pread(file, 1000, 0).decode(errors="replace").strip() or "another process"


def _write(file: int, text: str) -> None:
    os.ftruncate(file, 0)
    if text:
        os.pwrite(file, f"{text}\n".encode(), 0)
