"""Tests of real Horovod wait for a build that tests/run.sh has begun, and are skipped where there is none."""

from __future__ import annotations

import fcntl
import importlib
import sys
from pathlib import Path

import pytest

BUILDING = Path(sys.prefix) / ".horovod"  # locked by tests/run.sh while it builds


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They come last, when the build has had its time."""
    items.sort(key=lambda item: "horovod" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def _built() -> None:
    if BUILDING.exists():
        with BUILDING.open() as building:
            fcntl.flock(building, fcntl.LOCK_SH)
    importlib.invalidate_caches()  # it may have been installed after this process began


@pytest.fixture
def horovod(_built: None) -> None:
    """Horovod, installed for this environment's MPI."""
    # It starts MPI, whose traces in the environment the processes of a test run must not see.
    from hpcdist.comm.external import horovod as hvd

    if reason := hvd.obstacle():
        pytest.skip(reason)
