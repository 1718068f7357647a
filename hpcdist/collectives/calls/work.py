"""Collective calls that go on while the caller does something else, in the order in which they were begun."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from hpcdist.comm.communicator import Communicator, concurrent


class Work:
    """A call under way, or one that is over. Its tensors may be touched again once it is complete."""

    def __init__(self, call: Callable[[], None]):
        self._call, self._over = call, threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call; keep what it raises for whoever waits."""
        try:
            self._call()
        except BaseException as error:
            self._error = error
        finally:
            self._call = _nothing  # lets go of the tensors
            self._over.set()

    def done(self) -> bool:
        """Tell whether the call is over. Never blocks."""
        return self._over.is_set()

    def wait(self) -> None:
        """Block until the call is over; raise what it raised."""
        self._over.wait()
        if self._error is not None:
            raise self._error


class CallQueue:
    """Makes the calls of one communicator, one after the other, on a thread that begins with the first of them.

    Where MPI lets one thread alone call it, and on virtual ranks, a call is made at once, and is over when it begins.
    """

    def __init__(self, comm: Communicator):
        self._comm, self._concurrent = comm, concurrent(comm) and comm.trace.virtual is None and comm.size > 1
        self.waiting: deque[Work] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ends = False

    @property
    def busy(self) -> bool:
        """Tell whether a call is under way, or is to be made."""
        return bool(self.waiting)

    def begin(self, call: Callable[[], None]) -> Work:
        """Make a call when those begun before are over."""
        work = Work(call)
        if not self._concurrent:
            work.run()
            return work
        with self._changed:
            self.waiting.append(work)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hpcdist-collectives", daemon=True)
            self._comm.failures.threads.append(self)
            self._thread.start()
        return work

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.waiting or self._ends)
                if not self.waiting:
                    return
                work = self.waiting[0]
            work.run()
            with self._changed:
                self.waiting.popleft()

    def close(self) -> None:
        """Wait for all calls, and end the thread."""
        if self._thread is not None:
            with self._changed:
                self._ends = True
                self._changed.notify()
            self._thread.join()
            self._comm.failures.threads.remove(self)
            self._thread = None


def _nothing() -> None:
    pass
