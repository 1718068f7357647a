"""The cache of wheels: one folder for each set of versions that a wheel depends on, complete or absent."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from hpcdist.errors import ConfigError
from hpcdist.tools.horovod.tools import Tools

VERSION = "0.28.1"  # Horovod's last release
POLL_S = 0.5


def default_folder() -> Path:
    """Return the folder of the cache, in XDG_CACHE_HOME or ~/.cache."""
    return platformdirs.user_cache_path("hpcdist", appauthor=False) / "horovod"


def key(tools: Tools, prefix: Path) -> dict[str, str]:
    """Collect the versions that a wheel depends on.

    Horovod finds an MPI within the environment by a relative path, so that the key has no path of it.
    """
    within = Path(tools.mpi_folder).is_relative_to(prefix)
    return {
        "horovod": VERSION,
        "torch": tools.torch,
        "mpi": tools.mpi_version if within else f"{tools.mpi_version} in {tools.mpi_folder}",
        "python": ".".join(tools.python.split(".")[:2]) + (sysconfig.get_config_var("ABIFLAGS") or ""),
        "cuda": f"{tools.cuda_version}, NCCL in {tools.nccl_home}" if tools.cuda_home else "none",
        "compiler": f"{tools.cxx_version}, cxx11 abi {int(tools.cxx11_abi)}",
        "platform": sysconfig.get_platform(),
    }


class CachedBuild:
    """One wheel's place in the cache.

    Args:
        folder: of the cache; made if need be.
        key: the versions that the wheel depends on.

    Raises:
        ConfigError: the folder can't be made.
    """

    def __init__(self, folder: Path, key: Mapping[str, str]):
        self.key = dict(key)
        self._name = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:16]
        self._folder = folder / self._name
        self.log = folder / f"{self._name}.log"  # of the last build, also of one that failed
        self._building = folder / f"{self._name}.building"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--cache must be a folder that can be written; got {folder} ({error.strerror}). Choose another."
            ) from None

    @property
    def wheel(self) -> Path | None:
        """Return the wheel's path; None if it has not been built."""
        return next(iter(sorted(self._folder.glob("*.whl"))), None)

    @contextmanager
    def locked(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Lock the entry: within the context no other process builds this wheel.

        Args:
            waiting: called once where another process holds the lock.
        """
        lock = FileLock(self._folder.with_suffix(".lock"), timeout=0)
        try:
            lock.acquire()
        except Timeout:
            waiting()
            lock.acquire(timeout=-1, poll_interval=POLL_S)
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def building(self) -> Iterator[Path]:
        """Make a folder to build in, on the cache's file system, and remove it at the context's end. Needs the lock."""
        shutil.rmtree(self._building, ignore_errors=True)  # of a build that was killed
        self._building.mkdir()
        try:
            yield self._building
        finally:
            shutil.rmtree(self._building, ignore_errors=True)

    def keep(self, wheel: Path) -> Path:
        """Move a tested wheel from the folder to build in into the cache, in one step, and return its new path."""
        ready = self._building / "ready"
        ready.mkdir()
        wheel.rename(ready / wheel.name)
        (ready / "key.json").write_text(json.dumps(self.key, indent=2) + "\n")
        shutil.rmtree(self._folder, ignore_errors=True)
        os.replace(ready, self._folder)
        return self._folder / wheel.name
