"""Hosts joined by real TCP, for tests: see `jobs/studies/kit/hosts.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[Callable]:
    """Give `make_hosts(size, **cable)`, which makes hosts, once in a test. Skips where none can be made."""
    from kit import hosts

    with ExitStack() as stack:

        def make(size: int, **cable: float) -> hosts.Hosts:
            if reason := hosts.why_not(hosts.Cable(**cable)):
                pytest.skip(reason)
            return stack.enter_context(hosts.hosts(tmp_path / "hosts", size, hosts.Cable(**cable)))

        yield make
