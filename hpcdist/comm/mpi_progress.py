"""A thread that makes MPI progress while this process computes.

Some libraries move what is under way only while the process is inside MPI: a transfer that does not fit their buffers
then waits until the computation ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mpi4py import MPI

PROGRESS_S = 1e-3  # pause between two calls of MPI; they use 1 to 2 % of a core


class Progress:
    """One thread, however many need it."""

    _users = 0
    _running: Progress | None = None

    def __init__(self):
        from hpcdist.comm import mpi  # which needs this module

        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpcdist-mpi-progress", daemon=True)
        self._thread.start()
        mpi.threads.append(self)

    @classmethod
    @contextmanager
    def made(cls) -> Iterator[None]:
        """Inside, MPI makes progress."""
        cls._users += 1
        if cls._running is None:
            cls._running = cls()
        try:
            yield
        finally:
            cls._users -= 1
            if cls._users == 0 and cls._running is not None:
                cls._running.stop()

    def stop(self) -> None:
        """Ends the thread."""
        from hpcdist.comm import mpi

        self._stopped.set()
        self._thread.join()
        mpi.threads.remove(self)
        Progress._running = None

    def _run(self) -> None:
        while not self._stopped.wait(PROGRESS_S):
            # Looks after everything, whatever it asks for; on COMM_SELF, MPICH 5.0.2 would not look at the network.
            with suppress(MPI.Exception):  # of a rank that died, which others tell
                MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
