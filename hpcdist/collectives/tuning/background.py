"""All-reduce on a thread, beside the computation; and measuring whether that pays."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from statistics import median

from hpcdist.comm.communicator import Communicator

WARM_UP, MEASURED = 3, 7  # steps of each way that are left out and that count
WORTH = 0.95  # the second way must take less than this part of the first one's time: the rest is noise


class Background:
    """Run functions one after the other on a thread, which owns the communicators that they use."""

    def __init__(self, name: str = "hpcdist-allreduce"):
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._lock, self._pending = threading.Lock(), 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Queue a task and return at once."""
        with self._lock:
            self._pending += 1
            self._idle.clear()
        self._tasks.put(task)

    def wait(self) -> None:
        """Block until all tasks are done; raise the first one's error, if any has failed."""
        self._idle.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """End the thread once all tasks are done."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                if self._error is None:
                    task()
            except BaseException as error:
                self._error = error
            with self._lock:
                self._pending -= 1
                if self._pending == 0:
                    self._idle.set()


class Trial:
    """Measure which of two ways makes steps shorter: `way` False, then True; the ranks agree on the faster one.

    Each way is used for WARM_UP + MEASURED steps; the medians of the slowest rank decide.
    """

    def __init__(self, comm: Communicator):
        self._comm, self._last = comm, comm.now()
        self._taken_s: dict[bool, list[float]] = {False: [], True: []}
        self.way = False
        self.decided = False

    def step(self) -> None:
        """End a step, and set `way` for the next one. Collective at the step that decides."""
        now = self._comm.now()
        self._taken_s[self.way].append(now - self._last)
        self._last = now
        if len(self._taken_s[self.way]) < WARM_UP + MEASURED:
            return
        if not self.way:
            self.way = True
            return
        medians = [median(self._taken_s[way][WARM_UP:]) for way in (False, True)]
        apart_s, beside_s = (max(of_ranks) for of_ranks in zip(*self._comm.gather(medians), strict=True))
        self.way, self.decided = beside_s < WORTH * apart_s, True
