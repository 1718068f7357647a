"""Calls in flight: a work stands for each, and one thread makes the calls of a communicator in their order."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch

from hpcdist.comm.waiting import wait_until
from hpcdist.errors import ConfigError, MismatchError

NO_LIMIT = timedelta(0)
_LOCK = threading.Lock()  # held while a work ends, or gets a callback
# A callback of a future may itself make collective calls, and wait for them: so it must not block the thread that makes
# the calls. More threads than that wait for each other in no script.
_CALLBACKS = ThreadPoolExecutor(64, "hpcdist-futures")
# Works that Python has let go of: C++ may keep one, as DistributedDataParallel does for `join`, and can't wait for it
# without Python's half of it. Nobody tells until when, so the last ones stay.
LET_GO: deque[Work] = deque(maxlen=256)
KEPT_BYTES = 1 << 12  # of a tensor that stays with them

# torch may have been built without its package `distributed`.
_Base: Any = torch.distributed.Work if torch.distributed.is_available() else object


class Work(_Base):
    """A call or message in flight, or one that is over, with the methods of `torch.distributed.Work`.

    Args:
        tensors: the result, which the call writes; free to use once the call is complete.
        poll: returns whether it is over.
        block: blocks until it is over. None: it is over now.
        after: called once, when it is over, by whoever polls or waits.
        source: rank of the message; -1: unknown until it has arrived, or no message.
        queued: a thread ends it, by `run`; else whoever polls or waits does.

    Attributes:
        error: what the call raised.
        told: somebody has got the error.
        waited: somebody waits for it, without a timeout.
    """

    _poll: Callable[[], bool] | None = None
    _block: Callable[[], object] | None = None
    _after: Callable[[], object] | None = None
    _queued = told = waited = False
    source = -1
    _callbacks: tuple[Callable[[], object], ...] = ()
    error: BaseException | None = None

    def __init__(
        self, tensors: Any = None, poll: Callable[[], bool] | None = None, block: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None, source: int = -1, queued: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.tensors = tensors
        if block is not None or queued:
            self._poll, self._block, self._after, self.source, self._queued = poll, block, after, source, queued

    @classmethod
    def of_all(cls, works: Sequence[Any], tensors: Any) -> Work:
        """Return a work that is over when all of these are."""

        def block() -> None:
            for work in works:
                work.wait()

        return cls(tensors, lambda: all(work.is_completed() for work in works), block)

    def __del__(self, keep: Callable[[Work], None] = LET_GO.append) -> None:
        if self._queued:
            written = self.tensors if isinstance(self.tensors, (list, tuple)) else [self.tensors]
            if not all(isinstance(one, torch.Tensor) and one.nbytes <= KEPT_BYTES for one in written):
                self.tensors = []
            keep(self)

    def run(self, call: Callable[[], object] | None) -> None:
        """Make the call that this stands for, and end it; keep what the call raises for whoever waits."""
        try:
            if call is not None:
                call()
        except BaseException as error:
            self.error = error
        finally:
            with _LOCK:
                self._poll = self._block = self._after = None
            for callback in self._callbacks:
                callback()

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Block until the call is over; raise what it raised, or DeadlineError past a timeout."""
        block = self._block
        if block is not None:
            poll = self._poll
            if timeout > NO_LIMIT and poll is not None:
                wait_until(poll, timeout.total_seconds(), lambda: "the end of a call in flight")
            else:
                self.waited = True
                block()
            if not self._queued:
                self.run(self._after)
        if self.error is not None:
            self.raise_error()
        return True

    def raise_error(self) -> None:
        """Raise what the call raised, if it has."""
        if self.error is not None:
            self.told = True
            raise self.error

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call is over. Never blocks."""
        poll = self._poll
        if poll is not None and poll() and not self._queued:
            self.run(self._after)
        return self._poll is None

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return what the call raised; None while it is in flight."""
        self.told = self._block is None
        return self.error

    def result(self) -> Any:
        return self.tensors

    def source_rank(self) -> int:
        """Return the rank that a message comes from; wait for one that any rank may send."""
        if self.source < 0:
            self.wait()
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """Return a future with the result. A message, and several works, are waited for here."""
        if not self._queued:
            self.wait()
        over: torch.futures.Future = torch.futures.Future()
        # What a callback raises is an error to C++, too; what `set_exception` sets is a value there.
        future = over.then(partial(self._value, self.tensors))
        with _LOCK:
            in_flight = self._block is not None
            if in_flight:
                self._callbacks = (*self._callbacks, partial(_CALLBACKS.submit, over.set_result, None))
        if not in_flight:
            over.set_result(None)
        return future

    def _value(self, tensors: Any, _: object) -> Any:
        self.raise_error()
        return tensors


class CallQueue:
    """Makes the calls of one communicator, one after the other, on a thread that starts with the first of them.

    A call behind one that has failed is not made, and fails likewise, until somebody has got the error; unless that
    is of an argument, of which other ranks know.

    Args:
        threaded: this rank may have a further thread; else a call is made at once, and over when its work is returned.
    """

    running: ClassVar[list[CallQueue]] = []  # those that have a thread of this process's own

    def __init__(self, threaded: bool):
        self.threaded = threaded
        self._started = self._closing = False
        self._ident: int | None = None  # of the thread
        self._in_flight: deque[Work] = deque()
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._failed: list[Work] = []

    @property
    def busy(self) -> bool:
        """Return whether there are calls for whose end nobody waits."""
        return bool(self._in_flight) and not self._closing and not any(work.waited for work in tuple(self._in_flight))

    def run(self, call: Callable[[], object], tensors: Any = None, *, async_op: bool = False) -> Work | None:
        """Make a call, and return once it is over; or with `async_op` return its work at once, see `submit`.

        Where no other call comes before it, the caller's thread makes it. A call of the queue's own thread is a part
        of the one that it makes.
        """
        if async_op:
            return self.submit(call, tensors)
        if self._in_flight and self._ident != threading.get_ident():
            self.submit(call).wait()
        else:
            call()
        return None

    def submit(self, call: Callable[[], object], tensors: Any = None) -> Work:
        """Return a work at once, and make its call when those before it are over."""
        if not self.threaded:
            work = Work(tensors, queued=True)
            work.run(call)
            return work
        if not self._started:
            self._started = True
            self._start()
        over = self._event()
        work = Work(tensors, over.is_set, over.wait, queued=True)
        self._in_flight.append(work)
        self._put((work, call, over))
        return work

    def close(self) -> None:
        """Wait for all calls, and end the thread; raise the error of one that has failed and nobody has waited for."""
        if self._started:
            self._started, self._closing, over = False, True, self._event()
            self._put((None, None, over))
            over.wait()
            if self in self.running:
                self.running.remove(self)
        for work in self._failed:
            if not work.told:
                work.raise_error()

    def _run(self) -> None:
        self._ident = threading.get_ident()
        while True:
            work, call, over = self._next()
            if work is not None:
                self._execute(work, call)
                self._in_flight.popleft()
            over.set()
            if work is None:
                return

    def _execute(self, work: Work, call: Callable[[], object] | None) -> None:
        last = self._failed[-1] if self._failed else None
        if last is not None and not last.told and not isinstance(last.error, (ConfigError, MismatchError)):
            work.error, call = last.error, None
        work.run(call)
        if work.error is not None and (last is None or work.error is not last.error):
            self._failed.append(work)

    # --- what threads of virtual ranks do otherwise -----------------------------------------------------------------
    def _start(self) -> None:
        self.running.append(self)
        threading.Thread(target=self._run, name="hpcdist-calls", daemon=True).start()

    def _event(self) -> threading.Event:
        return threading.Event()

    def _put(self, task: Task) -> None:
        self._tasks.put(task)

    def _next(self) -> Task:
        return self._tasks.get()


Task = tuple[Work | None, Callable[[], object] | None, threading.Event]  # without a work: the end of the thread
