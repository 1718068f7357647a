"""A test that takes too long shows the stacks of all its threads, on every rank, and ends the run."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Callable, Generator

import _pytest
import pluggy
import pytest

from harness.console import Console

STATUS = 124  # as that of timeout(1)
BACKSTOP_S = 5.0  # after the limit, for code that never lets go of the interpreter lock
RUNNERS = (*(os.path.dirname(module.__file__) for module in (_pytest, pytest, pluggy)), "<frozen runpy>")


class TimeLimit:
    """A pytest plugin.

    Args:
        default_s: the limit of tests without the marker `time_limit`.
        end: shows a text and ends the run with a status; called from another thread than the test's.
    """

    def __init__(self, default_s: float, console: Console, end: Callable[[str, int], None]):
        self._default_s, self._console, self._end = default_s, console, end

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        marker = item.get_closest_marker("time_limit")
        limit_s = marker.args[0] if marker else self._default_s
        timer = threading.Timer(limit_s, self._expire, [item.nodeid, limit_s])
        timer.daemon = True
        timer.start()
        faulthandler.dump_traceback_later(limit_s + BACKSTOP_S, exit=True, file=self._console.fd)
        try:
            return (yield)
        finally:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()

    def _expire(self, nodeid: str, limit_s: float) -> None:
        self._end(f"{nodeid} took longer than its limit of {limit_s:g} s. Where it is:\n{stacks()}", STATUS)


def stacks() -> str:
    """The stacks of all other threads, innermost call last, without pytest's own frames; equal ones told once."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads: dict[str, list[str]] = {}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            entries = [e for e in traceback.extract_stack(frame) if not e.filename.startswith(RUNNERS)]
            threads.setdefault("".join(traceback.format_list(entries)), []).append(names.get(ident, str(ident)))
    return "\n".join(f"{', '.join(who)}:\n{stack}" for stack, who in threads.items())
