"""The time limit of an examination, wherever it hangs."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BACKSTOP_S = 5.0  # so much later the process ends even where a call lets no other thread run


class TimeLimit:
    """End the job from a thread of its own unless `cancel` is called within `seconds`.

    Args:
        expire: called by that thread; ends all ranks.
    """

    def __init__(self, seconds: float, expire: Callable[[], None]):
        self._timer = threading.Timer(seconds, expire)
        self._timer.name, self._timer.daemon = "hpcdist-doctor-limit", True
        self._timer.start()
        self._until = time.monotonic() + seconds
        faulthandler.dump_traceback_later(seconds + BACKSTOP_S, exit=True, file=sys.__stderr__)

    @contextmanager
    def sooner(self, seconds: float) -> Iterator[None]:
        """End this process without a word after so long inside the context, where no other thread may run."""
        with open(os.devnull, "w") as nowhere:
            faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
            try:
                yield
            finally:
                faulthandler.dump_traceback_later(self.left_s() + BACKSTOP_S, exit=True, file=sys.__stderr__)

    def left_s(self) -> float:
        """Return the seconds until then."""
        return max(self._until - time.monotonic(), 0.0)

    def cancel(self) -> None:
        """Remove the limit."""
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()
