"""The clock of the virtual cluster: a deterministic discrete-event simulation in which one rank runs at a time.

Each rank is a thread that runs only while it holds the baton (threads, because torch keeps grad mode and autograd's
state per thread). The queue holds what is due in virtual time: *effects*, generators that yield the time at which
they go on, and ranks that resume. While a rank's code runs, the clock shows that rank's time, and everything due by
then has happened. At equal times effects go before ranks, and then whatever was queued first goes first.
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

Effect = Iterator[float]
_EFFECT, _RANK = 0, 1  # which goes first at equal times
_STANDSTILL = 100_000  # turns without time passing, while a rank waits for it to pass: somebody spins
IDLE = "a task"  # what a further thread waits for that has nothing to do
_SEAM = os.path.dirname(os.path.dirname(__file__)) + os.sep  # whose lines are not the user's


class RankEnded(BaseException):
    """The end of a rank because the run has failed elsewhere. No Exception, so that only `finally` blocks see it."""


class VirtualRank:
    """A rank's thread, and its state on the clock; or a further thread of the rank, with a state of its own."""

    def __init__(self, rank: int, random: RandomState, live: Callable[[VirtualRank], None]):
        self.rank, self.random = rank, random
        self.thread = threading.Thread(target=live, args=[self], name=f"virtual rank {rank}", daemon=True)
        self.baton = threading.Lock()
        self.baton.acquire()
        self.awaits: object | None = None  # what it is blocked on; str() says it in words
        self.since_s = 0.0
        self.expires_s = math.inf  # deadline of the present wait
        self.timer_s = math.inf  # when the queue holds an effect that looks at it
        self.expired = False
        self.error: BaseException | None = None  # to be raised in the rank when it resumes
        self.polled: set[Hashable] = set()  # fruitless polls since it last did something or time passed
        self.polled_s = 0.0
        self.watched: list[Any] = []  # memory of this rank that others wait on; see enter()
        self.finished = False
        self.result: Any = None


class VirtualClock:
    """The scheduler of virtual ranks. All methods but `run` are called by the rank that runs, `me`, or by an effect."""

    def __init__(self, size: int, seed: int):
        self.now_s = 0.0
        self._current: VirtualRank | None = None
        self._body: Callable[[int], Any]
        self.ranks = [VirtualRank(rank, RandomState(seed, rank), self._live) for rank in range(size)]
        self._further: list[VirtualRank] = []  # threads
        self._queue: list[tuple[float, int, int, Any]] = []
        self._order = itertools.count()
        self._polling: list[VirtualRank] = []
        self._turns = 0  # of ranks at the present time
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
        except BaseException as interruption:  # Ctrl-C reaches the calling thread only
            self._end(interruption)
            self._finished.acquire()
        for me in [*self.ranks, *self._further]:
            if me.thread.ident is not None:
                me.thread.join()
        self._current, self._ending = None, False
        if self._failure is not None:
            raise self._failure
        return [me.result for me in self.ranks]

    def _live(self, me: VirtualRank, body: Callable[[], Any] | None = None) -> None:
        # Autograd has one thread for each GPU, where a rank that waits in a hook would keep all others back.
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
        self._look_at_memory(me)
        self._resume(self._due())

    def _end(self, error: BaseException) -> None:
        if not self._ending:
            self._failure, self._ending = error, True

    def thread(self, rank: int, body: Callable[[], None]) -> VirtualRank:
        """Start a further thread of a rank, which shares its random state. It is ended with the run at the latest."""
        own = self.ranks[rank]
        further = VirtualRank(rank, own.random, lambda me: self._live(me, body))
        further.watched = own.watched
        self._further.append(further)
        self._schedule(further, self.now_s)
        return further

    def running(self, rank: int) -> VirtualRank:
        """Return the thread of a rank that runs; its first one where another rank's does."""
        current = self._current
        return current if current is not None and current.rank == rank else self.ranks[rank]

    # --- what calls of the seam are made of -----------------------------------------------------------------------
    def enter(self, me: VirtualRank, *, polling: bool = False) -> None:
        """Begin a call of the seam; each of them calls this first."""
        if self._ending:
            raise RankEnded
        if self._current is not me or threading.get_ident() != me.thread.ident:
            runs = "no rank" if self._current is None else f"rank {self._current.rank}"
            raise CommunicationError(
                f"a virtual communicator must be used by its own rank and thread only; that of rank {me.rank} was used "
                f"in thread {threading.current_thread().name!r} while {runs} ran. Use the communicator that the body "
                "was called with, in the thread that called it."
            )
        self._look_at_memory(me)
        if not polling:
            me.polled.clear()

    def advance(self, me: VirtualRank, until_s: float) -> None:
        """Advance the time of the rank that runs. Other ranks run first if they are due before, or at the same time."""
        if self._queue and self._queue[0][0] <= until_s:
            self._schedule(me, until_s)
            self._hand_over(me)
        else:
            self.now_s = until_s

    def block(
        self,
        me: VirtualRank,
        awaits: object,
        deadline_s: float = math.inf,
        start: Callable[[], None] | None = None,
    ) -> None:
        """Block the rank that runs until it is woken by `wake`. `start()` is called once it can be woken.

        `awaits` says, by str(), what the rank waits for.
        """
        me.awaits, me.since_s, me.expired, me.expires_s = awaits, self.now_s, False, self.now_s + deadline_s
        if me.expires_s < me.timer_s:
            me.timer_s = me.expires_s
            self.spawn(self._expire(me, me.timer_s))
        if start is not None:
            start()
        self._hand_over(me)
        me.expires_s = math.inf
        if me.error is not None:
            error, me.error = me.error, None
            raise error
        if me.expired:
            raise DeadlineError(f"rank {me.rank} waited past the deadline of {deadline_s:g} virtual s for {awaits}.")

    def wake(self, rank: VirtualRank, at_s: float | None = None) -> None:
        """Wake a blocked rank, now or at a later time; do nothing where it has been woken already."""
        if rank.awaits is not None:
            rank.awaits = None
            self._schedule(rank, self.now_s if at_s is None else at_s)

    def spawn(self, effect: Effect) -> None:
        """Start an effect, or continue it; its actions at the present time are done when this returns."""
        for rank in self._polling:
            self.wake(rank)
        self._polling.clear()
        for at_s in effect:
            if at_s > self.now_s:
                heapq.heappush(self._queue, (at_s, _EFFECT, next(self._order), effect))
                return

    def perform(self, me: VirtualRank, awaits: str, *effects: Effect) -> None:
        """Block the rank that runs until all effects are over; they begin in their order."""
        left = [len(effects)]

        def start() -> None:
            for effect in effects:
                self.spawn(self._perform(effect, me, left))

        if effects:
            self.block(me, awaits, start=start)

    def _perform(self, effect: Effect, rank: VirtualRank, left: list[int]) -> Effect:
        try:
            yield from effect
        except BaseException as error:  # whichever thread runs the effect, the fault is that of the rank that began it
            rank.error = error
        left[0] -= 1
        if not left[0]:
            self.wake(rank)

    def poll(self, me: VirtualRank, key: Hashable, awaits: str, until_s: float = math.inf) -> None:
        """Note a non-blocking call without a result, so that time passes for a rank that calls it in a loop.

        When it asks the same once more, having done nothing else, it goes on with the next effect of any rank (at
        `until_s` at the latest); if there will be none, that is a deadlock like any other.
        """
        if me.polled_s != self.now_s:
            me.polled.clear()
            me.polled_s = self.now_s
        if key not in me.polled:
            me.polled.add(key)
            return
        me.polled.clear()
        if until_s < math.inf:
            heapq.heappush(self._queue, (until_s, _EFFECT, next(self._order), iter(())))
        self._polling.append(me)
        self.block(me, f"(polling) {awaits}")

    # --- the simulation -------------------------------------------------------------------------------------------
    def _schedule(self, rank: VirtualRank, at_s: float) -> None:
        heapq.heappush(self._queue, (at_s, _RANK, next(self._order), rank))

    def _due(self) -> VirtualRank | None:
        """Run the effects that are due, and return the rank that runs next; None once all have finished."""
        while self._queue and not self._ending:
            at_s, kind, _, task = heapq.heappop(self._queue)
            self._turns = self._turns + 1 if at_s == self.now_s else 0
            self.now_s = at_s
            if kind == _EFFECT:
                self.spawn(task)
            elif self._turns < _STANDSTILL or not self._stands_still(task):
                return task
        if not self._ending and not all(rank.finished for rank in self.ranks):
            self._end(DeadlockError(self._report()))
        left = [me for me in (*self.ranks, *self._further) if me.thread.ident is not None and not me.finished]
        self._ending |= bool(left)  # threads that nobody has closed
        return left[0] if left else None

    def _stands_still(self, due: VirtualRank) -> bool:
        later = [(at_s, task.rank) for at_s, kind, _, task in self._queue if kind == _RANK and at_s > self.now_s]
        if later:
            at_s, rank = min(later)
            self._end(DeadlockError(
                f"virtual time stands still at {self.now_s:g} s: ranks took {_STANDSTILL} turns without any time "
                f"passing, and rank {rank} goes on at {at_s:g} s only. Rank {due.rank} is {self.where(due)}. Wait by a "
                "call that waits (Window.wait, Request.wait, probe), or give the run a network that takes time."
            ))  # fmt: skip
        self._turns = 0
        return bool(later)

    def _hand_over(self, me: VirtualRank) -> None:
        due = self._due()
        if due is not me:
            me.random.save()
            self._resume(due)
            me.baton.acquire()
        if self._ending:
            raise RankEnded

    def _resume(self, rank: VirtualRank | None) -> None:
        """Let a rank go on; end the run where there is none left."""
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
        """End a wait of the rank at its deadline: one effect for all its waits, or they would fill the queue."""
        while at_s == rank.timer_s < math.inf:  # else there is an earlier one
            yield at_s
            if rank.awaits is not None and rank.expires_s <= self.now_s:
                rank.expired = True
                self.wake(rank)
            if at_s == rank.timer_s:
                at_s = rank.timer_s = math.inf if rank.awaits is None else rank.expires_s

    def _look_at_memory(self, me: VirtualRank) -> None:
        # The owner of a window changes its own memory without a call, at its own time, which is now.
        for memory in tuple(me.watched):
            memory.look()

    # --- messages -------------------------------------------------------------------------------------------------
    def _report(self) -> str:
        lines = [f"no virtual rank can go on at {self.now_s:g} virtual s:"]
        for rank in self.ranks:
            if rank.finished:
                lines.append(f"  rank {rank.rank} has returned")
            else:
                lines.append(self._waits(rank))
        lines += [self._waits(me) for me in self._further if not me.finished and me.awaits is not IDLE]
        return "\n".join(lines)

    def _waits(self, me: VirtualRank) -> str:
        which = f"rank {me.rank}" if me in self.ranks else f"a further thread of rank {me.rank}"
        return f"  {which} waits since {me.since_s:g} s for {me.awaits}, {self.where(me)}"

    def where(self, rank: VirtualRank) -> str:
        """Find the line of the user's code at which a rank is: the one that called the seam."""
        frame = sys._current_frames().get(rank.thread.ident or 0)
        stack = list(traceback.walk_stack(frame))  # it may begin inside `threading`, starting another rank
        ours = [frame.f_code.co_filename.startswith(_SEAM) for frame, _ in stack]
        caller, line = stack[ours.index(False, ours.index(True))]
        return f"at {caller.f_code.co_filename}:{line}"
