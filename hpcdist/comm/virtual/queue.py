"""The call queue of a virtual rank: its thread runs calls while the rank computes, both on the virtual clock."""

from __future__ import annotations

import threading
from collections import deque

from hpcdist.comm.virtual.clock import IDLE, VirtualRank
from hpcdist.comm.virtual.group import Member
from hpcdist.comm.work import CallQueue, Task


class VirtualQueue(CallQueue):
    """Runs a communicator's calls in order; see `CallQueue`. `member` is the rank in the communicator's group."""

    def __init__(self, member: Member):
        super().__init__(threaded=member.size > 1)
        self._member, self._waiting = member, deque[Task]()
        self._thread: VirtualRank

    def _start(self) -> None:
        self._thread = self._member.clock.thread(self._member.me.rank, self._run)

    def _event(self) -> threading.Event:
        self._member.enter()
        return VirtualEvent(self._member)

    def _put(self, task: Task) -> None:
        self._waiting.append(task)
        if self._thread.awaits is IDLE:
            self._member.clock.wake(self._thread)

    def _next(self) -> Task:
        while not self._waiting:
            self._member.clock.block(self._thread, IDLE)
        return self._waiting.popleft()


class VirtualEvent(threading.Event):
    """An event for which one thread of a virtual rank waits on the virtual clock."""

    def __init__(self, member: Member):
        super().__init__()
        self._member = member
        self._waits: VirtualRank | None = None

    def set(self) -> None:
        super().set()
        if self._waits is not None:
            self._member.clock.wake(self._waits)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until `set`, at most until the communicator's deadline; `timeout` is ignored."""
        self._member.enter()
        me = self._member.me
        try:
            while not self.is_set():
                self._waits = me
                self._member.clock.block(me, "the end of calls in flight", self._member.failures.deadline_s)
        finally:
            self._waits = None
        return True
