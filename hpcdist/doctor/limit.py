"""An end to an examination that hangs, wherever it does."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BACKSTOP_S = 5.0  # so much later the process ends whatever it is in: while MPI starts no other thread runs


class TimeLimit:
    """Ends the process from a thread of its own unless `cancel` comes within `seconds`.

    Args:
        expire: what the thread does then; ends all ranks.
    """

    def __init__(self, seconds: float, expire: Callable[[], None]):
        self._timer = threading.Timer(seconds, expire)
        self._timer.name, self._timer.daemon = "hpcdist-doctor-limit", True
        self._timer.start()
        self._last = time.monotonic() + seconds + BACKSTOP_S
        faulthandler.dump_traceback_later(seconds + BACKSTOP_S, exit=True, file=sys.__stderr__)

    @contextmanager
    def sooner(self, seconds: float) -> Iterator[None]:
        """Within the block, which may not let other threads run, the process ends so soon, without a word."""
        with open(os.devnull, "w") as nowhere:
            faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
            try:
                yield
            finally:
                left_s = max(self._last - time.monotonic(), 1e-3)
                faulthandler.dump_traceback_later(left_s, exit=True, file=sys.__stderr__)

    def cancel(self) -> None:
        """There is no limit any more."""
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()
