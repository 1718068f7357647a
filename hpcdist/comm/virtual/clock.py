"""The clock of the virtual cluster: a deterministic discrete-event simulation in which one rank runs at a time.

Each rank is a thread that runs only while it holds the baton, a lock per rank that the rank before it releases
(threads, because torch keeps grad mode and autograd's state per thread). The event queue holds, by virtual time, ranks
to resume and *effects*: generators that yield the time at which they continue. While a rank's code runs, the clock
shows that rank's time, and all earlier events have happened. At equal times effects precede ranks; otherwise the order
is first in, first out.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from hpcdist.comm.virtual.random import RandomState
from hpcdist.errors import CommunicationError, DeadlineError, DeadlockError

Effect = Iterator[float]  # yields the virtual times at which it continues
_EFFECT, _RANK = 0, 1  # priorities at equal times
_STANDSTILL = 100_000  # turns at the same time while a rank waits for a later time: a rank is spinning
IDLE = "a task"  # what an idle thread of a queue waits for
_COMM = os.path.dirname(os.path.dirname(__file__)) + os.sep  # files whose lines are not the user's


class RankEnded(BaseException):
    """Ends a rank after another rank has failed. A BaseException, so users' `except Exception` does not catch it."""


class VirtualRank:
    """A thread of a virtual rank, with its state on the clock: the rank's first thread, or one of a call queue."""

    def __init__(self, rank: int, random: RandomState, live: Callable[[VirtualRank], None]):
        self.rank, self.random = rank, random
        self.thread = threading.Thread(target=live, args=[self], name=f"virtual rank {rank}", daemon=True)
        self.baton = threading.Lock()
        self.baton.acquire()
        self.awaits: object | None = None  # what it is blocked on; str() describes it
        self.since_s = 0.0
        self.expires_s = math.inf  # deadline of the current wait
        self.timer_s = math.inf  # time of the queued effect that checks this deadline
        self.expired = False
        self.error: BaseException | None = None  # raised in the rank when it resumes
        self.polled: set[Hashable] = set()  # polls without a result since its last other call or since time passed
        self.polled_s = 0.0
        self.watched: list[Any] = []  # memory of this rank that other ranks wait on; see `enter`
        self.finished = False
        self.result: Any = None


class VirtualClock:
    """The scheduler of virtual ranks. All methods except `run` are called by the running rank `me` or an effect."""

    def __init__(self, size: int, seed: int):
        self.now_s = 0.0
        self._current: VirtualRank | None = None
        self._body: Callable[[int], Any]
        self.ranks = [VirtualRank(rank, RandomState(seed, rank), self._run_thread) for rank in range(size)]
        self._queue_threads: list[VirtualRank] = []  # threads of call queues
        self._queue: list[tuple[float, int, int, Any]] = []
        self._order = itertools.count()  # at equal times and priorities: first in, first out
        self._polling: list[VirtualRank] = []  # blocked in `poll`
        self._turns = 0  # turns of ranks at the current time
        self._ending = False
        self._failure: BaseException | None = None
        self._finished = threading.Lock()
        self._finished.acquire()

    # --- the run --------------------------------------------------------------------------------------------------
    def run(self, body: Callable[[int], Any]) -> list:
        """Run `body(rank)` on every rank; return the results in order, or raise the error of the first failing rank."""
        self._body = body
        for me in self.ranks:
            self._schedule(me, 0.0)
        try:
            self._resume(self._due())
            self._finished.acquire()
        except BaseException as interruption:  # Ctrl-C is raised in the calling thread only
            self._end(interruption)
            self._finished.acquire()
        for me in [*self.ranks, *self._queue_threads]:
            if me.thread.ident is not None:
                me.thread.join()
        self._current, self._ending = None, False
        if self._failure is not None:
            raise self._failure
        return [me.result for me in self.ranks]

    def _run_thread(self, me: VirtualRank, body: Callable[[], Any] | None = None) -> None:
        """Body of a thread: run `body`, by default the run's body on this rank; then resume the next rank."""
        # Autograd uses one thread per GPU, in which a rank that waits in a hook would block all other ranks.
        torch.autograd.set_multithreading_enabled(False)
        try:
            me.result = self._body(me.rank) if body is None else body()
        except RankEnded:
            pass
        except BaseException as error:
            if not self._ending:
                if hasattr(error, "add_note"):  # from Python 3.11 on
                    error.add_note(f"raised on virtual rank {me.rank} of {len(self.ranks)} at {self.now_s:g} virtual s")
                self._end(error)
        me.finished = True
        self._check_watched_memory(me)
        self._resume(self._due())

    def _end(self, error: BaseException) -> None:
        if not self._ending:
            self._failure, self._ending = error, True

    def thread(self, rank: int, body: Callable[[], None]) -> VirtualRank:
        """Start another thread of a rank, which shares its random state. The end of the run ends it."""
        first = self.ranks[rank]
        further = VirtualRank(rank, first.random, lambda me: self._run_thread(me, body))
        further.watched = first.watched
        self._queue_threads.append(further)
        self._schedule(further, self.now_s)
        return further

    def running(self, rank: int) -> VirtualRank:
        """Return the running thread of a rank; its first thread while another rank runs."""
        current = self._current
        return current if current is not None and current.rank == rank else self.ranks[rank]

    # --- operations that communicators use ------------------------------------------------------------------------
    def enter(self, me: VirtualRank, *, polling: bool = False) -> None:
        """Enter a call of a communicator; each call starts with this. `polling`: the call does not block."""
        if self._ending:
            raise RankEnded
        if self._current is not me or threading.get_ident() != me.thread.ident:
            runs = "no rank" if self._current is None else f"rank {self._current.rank}"
            raise CommunicationError(
                f"a virtual communicator must be used only in its rank's thread; that of rank {me.rank} was used "
                f"in thread {threading.current_thread().name!r} while {runs} ran. Use the communicator that the body "
                "was called with, in the same thread."
            )
        self._check_watched_memory(me)
        if not polling:
            me.polled.clear()

    def advance(self, me: VirtualRank, until_s: float) -> None:
        """Advance the time of the running rank. Ranks that are due before, or at the same time, run first."""
        if self._queue and self._queue[0][0] <= until_s:
            self._schedule(me, until_s)
            self._yield_baton(me)
        else:
            self.now_s = until_s

    def block(
        self, me: VirtualRank, awaits: object, deadline_s: float = math.inf, start: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Block the running rank until `wake`.

        Args:
            awaits: str() describes what the rank waits for.
            deadline_s: virtual seconds after which DeadlineError is raised.
            start: called once the rank can be woken.
        """
        me.awaits, me.since_s, me.expired, me.expires_s = awaits, self.now_s, False, self.now_s + deadline_s
        if me.expires_s < me.timer_s:
            me.timer_s = me.expires_s
            self.spawn(self._expire(me, me.timer_s))
        if start is not None:
            start()
        self._yield_baton(me)
        me.expires_s = math.inf
        if me.error is not None:
            error, me.error = me.error, None
            raise error
        if me.expired:
            raise DeadlineError(f"rank {me.rank} waited past the deadline of {deadline_s:g} virtual s for {awaits}.")

    def wake(self, rank: VirtualRank, at_s: float | None = None) -> None:
        """Wake a blocked rank, now or at a later time; do nothing if it has been woken already."""
        if rank.awaits is not None:
            rank.awaits = None
            self._schedule(rank, self.now_s if at_s is None else at_s)

    def spawn(self, effect: Effect) -> None:
        """Wake the polling ranks, and run an effect, new or due, until it yields a later time; queue it for then."""
        for rank in self._polling:  # what they poll for may be done by this effect
            self.wake(rank)
        self._polling.clear()
        for at_s in effect:
            if at_s > self.now_s:
                heapq.heappush(self._queue, (at_s, _EFFECT, next(self._order), effect))
                return

    def perform(self, me: VirtualRank, awaits: str, *effects: Effect) -> None:
        """Block the running rank until all effects are complete; they start in order."""
        remaining = [len(effects)]  # a list, which the effects change

        def start() -> None:
            for effect in effects:
                self.spawn(self._perform(effect, me, remaining))

        if effects:
            self.block(me, awaits, start=start)

    def _perform(self, effect: Effect, rank: VirtualRank, remaining: list[int]) -> Effect:
        """Effect: run one of the effects of `perform`; the last one to end wakes the rank."""
        try:
            yield from effect
        except BaseException as error:  # another rank's thread may run the effect; raise in the rank that started it
            rank.error = error
        remaining[0] -= 1
        if not remaining[0]:
            self.wake(rank)

    def poll(self, me: VirtualRank, key: Hashable, awaits: str, until_s: float = math.inf) -> None:
        """Record a non-blocking call without a result, so that time passes for a rank that polls in a loop.

        If the rank repeats the call, with no other in between, it blocks until the next effect of any rank, at
        most until `until_s`; without a further effect that is a deadlock.
        """
        if me.polled_s != self.now_s:
            me.polled.clear()
            me.polled_s = self.now_s
        if key not in me.polled:
            me.polled.add(key)
            return
        me.polled.clear()
        if until_s < math.inf:
            heapq.heappush(self._queue, (until_s, _EFFECT, next(self._order), iter(())))  # does nothing but wake it
        self._polling.append(me)
        self.block(me, f"(polling) {awaits}")

    # --- the simulation -------------------------------------------------------------------------------------------
    def _schedule(self, rank: VirtualRank, at_s: float) -> None:
        heapq.heappush(self._queue, (at_s, _RANK, next(self._order), rank))

    def _due(self) -> VirtualRank | None:
        """Run the effects that are due, and return the next rank to run; None if all have finished.

        At the end of the run, that is each unfinished rank in turn: RankEnded is raised in it.
        """
        while self._queue and not self._ending:
            at_s, kind, _, task = heapq.heappop(self._queue)
            self._turns = self._turns + 1 if at_s == self.now_s else 0
            self.now_s = at_s
            if kind == _EFFECT:
                self.spawn(task)
            elif self._turns < _STANDSTILL or not self._check_standstill(task):
                return task
        if not self._ending and not all(rank.finished for rank in self.ranks):
            self._end(DeadlockError(self._report()))
        unfinished = [
            me for me in (*self.ranks, *self._queue_threads) if me.thread.ident is not None and not me.finished
        ]
        self._ending |= bool(unfinished)  # after all ranks have returned: threads of queues that were not closed
        return unfinished[0] if unfinished else None

    def _check_standstill(self, due: VirtualRank) -> bool:
        """End the run with an error if a rank waits for a later time that never comes; return whether that is so."""
        later = [(at_s, task.rank) for at_s, kind, _, task in self._queue if kind == _RANK and at_s > self.now_s]
        if later:
            at_s, rank = min(later)
            self._end(DeadlockError(
                f"virtual time stands still at {self.now_s:g} s: ranks took {_STANDSTILL} turns without any time "
                f"passing, and rank {rank} continues only at {at_s:g} s. Rank {due.rank} is {self.where(due)}. Wait by "
                "a blocking call (Window.wait, Request.wait, probe), or set a network with a latency."
            ))  # fmt: skip
        self._turns = 0
        return bool(later)

    def _yield_baton(self, me: VirtualRank) -> None:
        """Let the next due rank run; return when this rank is due again."""
        due = self._due()
        if due is not me:
            me.random.save()
            self._resume(due)
            me.baton.acquire()
        if self._ending:
            raise RankEnded

    def _resume(self, rank: VirtualRank | None) -> None:
        """Resume a rank; end the run if there is none."""
        if rank is None:
            self._finished.release()
            return
        rank.random.load()
        self._current = rank
        if rank.thread.ident is None:
            rank.thread.start()
        else:
            rank.baton.release()

    def _expire(self, rank: VirtualRank, at_s: float) -> Effect:
        """Effect: end a rank's wait at its deadline. A single one serves all its waits: many would fill the queue."""
        while at_s == rank.timer_s < math.inf:  # otherwise an earlier effect has replaced this one
            yield at_s
            if rank.awaits is not None and rank.expires_s <= self.now_s:
                rank.expired = True
                self.wake(rank)
            if at_s == rank.timer_s:
                at_s = rank.timer_s = math.inf if rank.awaits is None else rank.expires_s

    def _check_watched_memory(self, me: VirtualRank) -> None:
        """Wake ranks that wait for a change of this rank's memory, which its code changes without a call."""
        for memory in tuple(me.watched):
            memory.changed()

    # --- messages -------------------------------------------------------------------------------------------------
    def _report(self) -> str:
        """Describe what each rank waits for, for DeadlockError."""
        lines = [f"no virtual rank can continue at {self.now_s:g} virtual s:"]
        for rank in self.ranks:
            if rank.finished:
                lines.append(f"  rank {rank.rank} has returned")
            else:
                lines.append(self._waits(rank))
        lines += [self._waits(me) for me in self._queue_threads if not me.finished and me.awaits is not IDLE]
        return "\n".join(lines)

    def _waits(self, me: VirtualRank) -> str:
        which = f"rank {me.rank}" if me in self.ranks else f"a queue's thread of rank {me.rank}"
        return f"  {which} waits since {me.since_s:g} s for {me.awaits}, {self.where(me)}"

    def where(self, rank: VirtualRank) -> str:
        """Return the line of the user's code at which a rank called the communicator."""
        frame = sys._current_frames().get(rank.thread.ident or 0)
        stack = list(traceback.walk_stack(frame))  # it may start inside `threading`, starting another rank
        in_package = [frame.f_code.co_filename.startswith(_COMM) for frame, _ in stack]
        caller, line = stack[in_package.index(False, in_package.index(True))]
        return f"at {caller.f_code.co_filename}:{line}"
