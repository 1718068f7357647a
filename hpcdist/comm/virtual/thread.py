"""A further thread of a virtual rank, which makes calls while the rank computes, both on the virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hpcdist.comm.virtual.clock import IDLE, RankEnded, VirtualRank
from hpcdist.comm.virtual.group import Member


class VirtualThread:
    """Run functions one after the other; see `hpcdist.comm.background.Beside`.

    Args:
        member: of the communicator that they use.
    """

    def __init__(self, member: Member):
        self._member, self._clock = member, member.clock
        self._tasks: deque[Callable[[], None] | None] = deque()
        self._pending = 0
        self._error: BaseException | None = None
        self._waiting: tuple[int, VirtualRank] | None = None  # how many tasks may be left, and who waits for it
        self._thread = self._clock.thread(member.me.rank, self._run)

    def submit(self, task: Callable[[], None]) -> None:
        self._member.enter()
        self._pending += 1
        self._put(task)

    def wait(self, left: int = 0) -> None:
        self._member.enter()
        me = self._member.me
        while self._pending > left:
            self._waiting = (left, me)
            self._clock.block(me, "the end of exchanges beside", self._member.failures.deadline_s)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        self.wait()
        self._put(None)

    def _put(self, task: Callable[[], None] | None) -> None:
        self._tasks.append(task)
        if self._thread.awaits is IDLE:
            self._clock.wake(self._thread)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                if self._error is None:
                    task()
            except RankEnded:
                raise
            except BaseException as error:
                self._error = error
            self._pending -= 1
            if self._waiting is not None and self._pending <= self._waiting[0]:
                self._clock.wake(self._waiting[1])
                self._waiting = None

    def _next(self) -> Callable[[], None] | None:
        while not self._tasks:
            self._clock.block(self._thread, IDLE)
        return self._tasks.popleft()
