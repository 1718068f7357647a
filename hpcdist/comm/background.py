"""A thread beside the computation, which makes calls of a communicator one after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from hpcdist.comm.capabilities import Failures


class Beside(Protocol):
    """A thread of a rank that runs functions one after the other while the rank goes on."""

    def submit(self, task: Callable[[], None]) -> None:
        """Queue a task and return at once."""

    def wait(self, left: int = 0) -> None:
        """Block until all tasks but the last `left` are done; raise the first one's error, if any has failed."""

    def close(self) -> None:
        """End the thread once all tasks are done."""


class Background:
    """Run functions one after the other on a thread, which owns the communicator that they use.

    Args:
        failures: of that communicator.

    Attributes:
        pending: tasks that are under way, or to be run.
    """

    def __init__(self, failures: Failures, name: str = "hpcdist-allreduce"):
        failures.threads.append(self)
        self._awaited = False
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended, self.pending = threading.Condition(), 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Tell whether there are tasks for whose end nobody waits."""
        return self.pending > 0 and not self._awaited

    def submit(self, task: Callable[[], None]) -> None:
        """Queue a task and return at once."""
        with self._ended:
            self.pending += 1
        self._tasks.put(task)

    def wait(self, left: int = 0) -> None:
        """Block until all tasks but the last `left` are done; raise the first one's error, if any has failed."""
        with self.awaited(), self._ended:
            self._ended.wait_for(lambda: self.pending <= left)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Let the others know, inside the context, that the script waits for this thread."""
        self._awaited = True
        try:
            yield
        finally:
            self._awaited = False

    def close(self) -> None:
        """End the thread once all tasks are done."""
        self._tasks.put(None)
        with self.awaited():
            self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                if self._error is None:
                    task()
            except BaseException as error:
                self._error = error
            with self._ended:
                self.pending -= 1
                self._ended.notify_all()
