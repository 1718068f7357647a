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


class ProgressThread:
    """One thread that makes MPI progress while at least one communicator needs it."""

    def __init__(self) -> None:
        self._users = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make progress inside the context."""
        self._users += 1
        if self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._run, name="hpcdist-mpi-progress", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                self.stop()

    def stop(self) -> None:
        """End the thread, if it is running."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._stopped.wait(PROGRESS_S):
            # Looks after everything, whatever it asks for; on COMM_SELF, MPICH 5.0.2 would not look at the network.
            with suppress(MPI.Exception):  # of a rank that died, which others tell
                MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
