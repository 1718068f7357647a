"""Hosts joined by real TCP, for tests: those of `jobs/network_study/hosts.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest

JOBS = Path(__file__).parents[2] / "jobs"


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that makes hosts."""
    monkeypatch.syspath_prepend(str(JOBS))
    from network_study import hosts

    return hosts


@pytest.fixture
def make_hosts(kit: ModuleType, tmp_path: Path) -> Iterator[Callable]:
    """`make_hosts(size, **cable)` makes hosts, once in a test; they go when it ends. Skips where none can be made."""
    with ExitStack() as stack:

        def make(size: int, **cable: float):
            if reason := kit.why_not(kit.Cable(**cable)):
                pytest.skip(reason)
            folder = tmp_path / "hosts"
            folder.mkdir()
            return stack.enter_context(kit.hosts(folder, size, kit.Cable(**cable)))

        yield make
