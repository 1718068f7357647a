"""Asynchronous calls: `Work` is the handle of a call in flight; `CallQueue` runs a communicator's calls in order."""

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
# A callback of a future may itself run collective calls and wait for them, so it must not block the thread that runs
# the calls. No script nests more callbacks than there are threads here.
_CALLBACKS = ThreadPoolExecutor(64, "hpcdist-futures")
# Works without references in Python. C++ may still hold one, as DistributedDataParallel does for `join`, and can't wait
# for it without the Python object. It is unknown for how long, so the most recent ones are kept.
RELEASED: deque[Work] = deque(maxlen=256)
KEPT_BYTES = 1 << 12  # longer tensors of these works are dropped

# torch may have been built without its package `distributed`.
_Base: Any = torch.distributed.Work if torch.distributed.is_available() else object


class Work(_Base):
    """Handle of a call or message, in flight or complete, with the methods of `torch.distributed.Work`.

    Args:
        tensors: the result; use it only after the call is complete.
        poll: returns whether the call is complete.
        block: blocks until it is complete. None: it is complete already.
        after: called once at completion, by the thread that polls or waits.
        source: source rank of a message; -1: not yet known, or no message.
        queued: a queue's thread completes it by `run`; otherwise the thread that polls or waits does.

    Attributes:
        error: exception that the call raised.
        retrieved: whether `error` has been raised or returned to a caller.
        waited: whether a thread waits for it without a timeout.
    """

    _poll: Callable[[], bool] | None = None
    _block: Callable[[], object] | None = None
    _after: Callable[[], object] | None = None
    _queued = retrieved = waited = False
    source = -1
    _callbacks: tuple[Callable[[], object], ...] = ()
    error: BaseException | None = None

    def __init__(
        self, tensors: Any = None, poll: Callable[[], bool] | None = None, block: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None, source: int = -1, queued: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.tensors = tensors
        if block is not None or queued:  # otherwise it is complete, as the class attributes say
            self._poll, self._block, self._after, self.source, self._queued = poll, block, after, source, queued

    @classmethod
    def of_all(cls, works: Sequence[Any], tensors: Any) -> Work:
        """Return a work that is complete when all of `works` are."""

        def block() -> None:
            for work in works:
                work.wait()

        return cls(tensors, lambda: all(work.is_completed() for work in works), block)

    def __del__(self, keep: Any = RELEASED.append, kind: Any = torch.Tensor, most: int = KEPT_BYTES) -> None:
        """Keep a queued work alive for C++ (see `RELEASED`), without its tensors if these are large."""
        if self._queued:
            results = self.tensors if isinstance(self.tensors, (list, tuple)) else [self.tensors]
            if not all(isinstance(x, kind) and not x.is_sparse and x.nbytes <= most for x in results):
                self.tensors = []
            keep(self)

    def run(self, call: Callable[[], object] | None) -> None:
        """Run the call and mark the work complete; an exception is kept for the thread that waits."""
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
        """Block until the call is complete; raise its exception, or DeadlineError past a timeout (0: none)."""
        block = self._block
        if block is not None:
            poll = self._poll
            if timeout > NO_LIMIT and poll is not None:
                wait_until(poll, timeout.total_seconds(), lambda: "the end of a call in flight")
            else:
                self.waited = True
                block()
            if not self._queued:  # else the queue's thread has done this
                self.run(self._after)
        if self.error is not None:
            self.raise_error()
        return True

    def raise_error(self) -> None:
        """Raise the call's exception, if any."""
        if self.error is not None:
            self.retrieved = True
            raise self.error

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call is complete. Never blocks."""
        poll = self._poll
        if poll is not None and poll() and not self._queued:
            self.run(self._after)
        return self._poll is None

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the call's exception; None while it is in flight."""
        self.retrieved = self._block is None
        return self.error

    def result(self) -> Any:
        return self.tensors

    def source_rank(self) -> int:
        """Return the source rank of a message; a receive from any source waits for its message first."""
        if self.source < 0:
            self.wait()
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """Return a future of the result. Waits first for the result of a work that no queue's thread completes."""
        if not self._queued:
            self.wait()
        completion: torch.futures.Future = torch.futures.Future()
        # C++ sees an exception from a callback as an error, but one from `set_exception` as a value.
        future = completion.then(partial(self._value, self.tensors))
        with _LOCK:
            in_flight = self._block is not None
            if in_flight:
                self._callbacks = (*self._callbacks, partial(_CALLBACKS.submit, completion.set_result, None))
        if not in_flight:
            completion.set_result(None)
        return future

    def _value(self, tensors: Any, _: object) -> Any:
        """Return the future's value, or raise the call's exception. Called with the future that ends with the call."""
        self.raise_error()
        return tensors


class CallQueue:
    """Runs the calls of one communicator in order, on a thread that starts with the first asynchronous call.

    After a call has failed, later calls fail with the same error without running, until the error has been retrieved;
    except after errors of arguments, which all ranks raise.

    Args:
        threaded: this rank may start a thread; otherwise `submit` runs the call immediately.

    Example:
        >>> queue, total = comm.queue(), torch.ones(4)
        >>> work = queue.submit(lambda: comm.allreduce(total))
        >>> work.wait()  # compute before this line to overlap communication
        True
        >>> queue.close()
    """

    running: ClassVar[list[CallQueue]] = []  # queues with a thread in this process

    def __init__(self, threaded: bool):
        self.threaded = threaded
        self._started = self._closing = False
        self._ident: int | None = None  # of the thread
        self._in_flight: deque[Work] = deque()
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._failed: list[Work] = []

    @property
    def busy(self) -> bool:
        """Return whether calls are in flight that no thread waits for."""
        return bool(self._in_flight) and not self._closing and not any(work.waited for work in tuple(self._in_flight))

    def run(self, call: Callable[[], object], tensors: Any = None, *, async_op: bool = False) -> Work | None:
        """Run a call and return when it is complete; with `async_op` return its work immediately, see `submit`.

        If no other call is in flight, the caller's thread runs it. From within a call of this queue it runs directly,
        as a part of that call.
        """
        if async_op:
            return self.submit(call, tensors)
        if self._in_flight and self._ident != threading.get_ident():
            self.submit(call).wait()
        else:
            call()
        return None

    def submit(self, call: Callable[[], object], tensors: Any = None) -> Work:
        """Queue a call behind the calls in flight; return its work immediately."""
        if not self.threaded:
            work = Work(tensors, queued=True)
            work.run(call)
            return work
        if not self._started:
            self._started = True
            self._start()
        complete = self._event()
        work = Work(tensors, complete.is_set, complete.wait, queued=True)
        self._in_flight.append(work)
        self._put((work, call, complete))
        return work

    def close(self) -> None:
        """Wait for all calls and end the thread; raise an error of a call that was not retrieved yet."""
        if self._started:
            self._started, self._closing, complete = False, True, self._event()
            self._put((None, None, complete))
            complete.wait()
            if self in self.running:
                self.running.remove(self)
        for work in self._failed:
            if not work.retrieved:
                work.raise_error()

    def _run(self) -> None:
        """The queue's thread: run calls until `close`."""
        self._ident = threading.get_ident()
        while True:
            work, call, complete = self._next()
            if work is not None:
                self._execute(work, call)
                self._in_flight.popleft()
            complete.set()
            if work is None:
                return

    def _execute(self, work: Work, call: Callable[[], object] | None) -> None:
        """Run a call; if the error of an earlier one was not retrieved, fail with that error instead."""
        failed = self._failed[-1] if self._failed else None
        if failed is not None and not failed.retrieved and not isinstance(failed.error, (ConfigError, MismatchError)):
            work.error, call = failed.error, None
        work.run(call)
        if work.error is not None and (failed is None or work.error is not failed.error):  # the call itself has failed
            self._failed.append(work)

    # --- overridden for threads of virtual ranks ----------------------------------------------------------------------
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
