"""Collective calls that go on while the caller does something else, in the order in which they were begun."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from hpcdist.comm.background import Background
from hpcdist.comm.communicator import Communicator, concurrent
from hpcdist.errors import DeadlineError


class Work:
    """A call under way, or one that is over. Its tensors may be touched again once it is complete.

    Attributes:
        error: what the call raised.
        told: somebody has got the error.
    """

    def __init__(self, call: Callable[[], None], awaited: Callable[[], AbstractContextManager[None]] = nullcontext):
        self._call, self._awaited, self._over = call, awaited, threading.Event()
        self._lock, self._followers = threading.Lock(), list[Callable[[], object]]()
        self.error: BaseException | None = None
        self.told = False

    def run(self) -> None:
        """Make the call; keep what it raises for whoever waits."""
        try:
            self._call()
        except BaseException as error:
            self.error = error
        finally:
            self._call = _nothing  # lets go of the tensors
            with self._lock:
                self._over.set()
            for follower in self._followers:
                follower()

    def when_over(self, follower: Callable[[], object]) -> None:
        """Call a function once the call is over, on the thread that makes it; at once where it is over."""
        with self._lock:
            over = self._over.is_set()
            if not over:
                self._followers.append(follower)
        if over:
            follower()

    def done(self) -> bool:
        """Tell whether the call is over. Never blocks."""
        return self._over.is_set()

    def wait(self, limit_s: float | None = None) -> None:
        """Block until the call is over; raise what it raised, or DeadlineError after so many seconds."""
        with self._awaited():
            over = self._over.wait(limit_s)
        if not over:
            raise DeadlineError(f"a collective call was not over after {limit_s:g} s. Give it more time.")
        self.raise_error()

    def raise_error(self) -> None:
        """Raise what the call raised, if it has."""
        if self.error is not None:
            self.told = True
            raise self.error


class CallQueue:
    """Makes the calls of one communicator, one after the other, on a thread that begins with the first of them.

    Where MPI lets one thread alone call it, and on virtual ranks, a call is made at once, and is over when it begins.
    """

    def __init__(self, comm: Communicator):
        self._comm, self._concurrent = comm, concurrent(comm) and comm.trace.virtual is None and comm.size > 1
        self._thread: Background | None = None
        self._failed: list[Work] = []

    @property
    def waiting(self) -> int:
        """Return the number of calls that are under way, or to be made."""
        return 0 if self._thread is None else self._thread.pending

    def begin(self, call: Callable[[], None]) -> Work:
        """Make a call when those begun before are over."""
        if not self._concurrent:
            work = Work(call)
            work.run()
            return work
        if self._thread is None:
            self._thread = Background(self._comm.failures, "hpcdist-collectives")
        work = Work(call, self._thread.awaited)

        def run() -> None:
            work.run()
            if work.error is not None:
                self._failed.append(work)

        self._thread.submit(run)
        return work

    def close(self) -> None:
        """Wait for all calls, and end the thread; raise the error of one that has failed and nobody has waited for."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        for work in self._failed:
            if not work.told:
                work.raise_error()


def _nothing() -> None:
    pass
