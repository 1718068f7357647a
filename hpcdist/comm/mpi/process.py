"""State of a process for all of its communicators: created when it joins the job, closed at the end.

Part of it is a thread that makes MPI progress while the process computes: some libraries transfer messages only while
the process is inside MPI; a message that exceeds their buffers would then wait until the computation ends.
"""

from __future__ import annotations

import atexit
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from mpi4py import MPI

from hpcdist.comm.mpi.calls import ALL_RANKS, EXIT, Calls, RankLocation, barrier
from hpcdist.comm.mpi.watchdog import Watchdog
from hpcdist.comm.waiting import wait_until

PROGRESS_S = 1e-3  # pause between two MPI calls, which use 1 to 2 % of a core


class ProgressThread:
    """A background thread that makes MPI progress while at least one communicator requests it."""

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
            # Any probe progresses all communication; on COMM_SELF, MPICH 5.0.2 would not check the network.
            with suppress(MPI.Exception):  # a rank has died, which other code reports
                MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)


class Process:
    """The communicators in use, background threads and watchdog of this process.

    Args:
        tolerant: the job continues when a rank dies, and MPI reports the death (`mpirun --with-ft ulfm`).
    """

    def __init__(self, *, tolerant: bool = False):
        self.tolerant = tolerant
        self.world: Any = None  # the communicator of all ranks of the job, while it exists
        self.progress = ProgressThread()
        self.calls: weakref.WeakValueDictionary[int, Calls] = weakref.WeakValueDictionary()
        self.threads: list[Any] = []  # objects whose `stop` ends threads, before MPI ends
        self._watchdog: Watchdog | None = None
        self._of_all: tuple[Calls, MPI.Intracomm] | None = None

    def calls_in_use(self) -> list[Calls]:
        """Return the `calls` of the communicators in use. Any thread may call this."""
        return [calls for reference in self.calls.valuerefs() if (calls := reference()) is not None]

    def watch(self, mpi: MPI.Intracomm, pids: Mapping[int, int], role: Callable[[], str]) -> None:
        """Collective. Watch the calling thread: past a deadline the job ends, with a message of where each rank is.

        The arguments are as for `Watchdog`.
        """
        watchdog = Watchdog(mpi, pids, self.calls_in_use, role, tolerant=self.tolerant)
        if watchdog.start():
            self._watchdog = watchdog
            self.threads.append(watchdog)

    def locate_ranks(self) -> Mapping[int, RankLocation]:
        """Return where each rank of the job is; empty without a watchdog."""
        return {} if self._watchdog is None else self._watchdog.find_all()

    # --- the end --------------------------------------------------------------------------------------------------
    def close_at_exit(self, calls: Calls) -> None:
        """Collective. Close this process at the end of the script; `calls` are those of the world communicator."""
        if self._of_all is None:
            atexit.register(self.close)
        self._of_all = calls, MPI.COMM_WORLD.Dup()

    def close(self) -> None:
        """Collective. Wait for the other ranks, then end this package's threads.

        Until all ranks have called this, windows are still served, and the watchdog still replies. MPI must not be
        finalized while a thread may be inside it (MPI 4.1, 11.10).
        """
        if self._of_all is None or MPI.Is_finalized():
            return
        calls, everyone = self._of_all
        with calls.blocked(EXIT, ALL_RANKS, math.inf):
            if self.tolerant:
                barrier(everyone)
            else:
                wait_until(everyone.Ibarrier().Test, math.inf, str)  # a barrier that leaves the core to others
        self.progress.stop()
        for thread in list(self.threads):
            thread.stop()
        self.threads.clear()
        self._watchdog = None
