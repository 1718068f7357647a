"""What torch.distributed gets of a call: a work that it may wait for, with its future."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transfer import Request
from hpcdist.comm.waiting import wait_until

NO_LIMIT = timedelta(0)
# What a script has a future call may itself make collective calls, and wait for them: so it must not keep the thread
# that makes those. More threads than that wait for each other in no script.
_FOLLOWERS = ThreadPoolExecutor(64, "hpcdist-futures")
# Works that Python has let go of, and not waited for: C++ may keep one, as DistributedDataParallel does for `join`, and
# can't wait for it without Python's half of it. Nobody tells until when, so the last ones stay.
LET_GO: deque[Begun] = deque(maxlen=256)
KEPT_BYTES = 1 << 12  # of a tensor that stays with them


class Over(dist.Work):
    """A call that is over.

    Args:
        found: the tensors that it has written.
    """

    def __init__(self, found: Any):
        super().__init__()
        self.found = found

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> Any:
        return self.found

    def get_future(self) -> torch.futures.Future:
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.found)
        return future


class Begun(Over):
    """A call that goes on beside the script.

    Args:
        work: of hpcdist's.
    """

    _asked = False  # somebody has waited for it, or has its future

    def __init__(self, work: Any, found: Any):
        super().__init__(found)
        self._work = work

    def __del__(self, keep: Callable[[Begun], None] = LET_GO.append) -> None:
        if not self._asked:
            if not all(isinstance(one, torch.Tensor) and one.nbytes <= KEPT_BYTES for one in self.found):
                self.found = []
            keep(self)

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        self._asked = True
        self._work.wait(timeout.total_seconds() if timeout > NO_LIMIT else None)
        return True

    def is_completed(self) -> bool:
        return self._work.done()

    def exception(self) -> BaseException | None:
        self._work.told = self._work.done()
        return self._work.error

    def get_future(self) -> torch.futures.Future:
        self._asked = True
        over: torch.futures.Future = torch.futures.Future()
        # What a callback raises is an error to C++, too; what `set_exception` sets is a value there.
        future = over.then(self._value)
        if self._work.done():
            over.set_result(None)
        else:
            self._work.when_over(partial(_FOLLOWERS.submit, over.set_result, None))
        return future

    def _value(self, _: object) -> Any:
        self._work.raise_error()
        return self.found


class Sent(Over):
    """A message under way.

    Args:
        request: the transfer.
        after: called once when it is complete.
        source: the rank that it comes from.
    """

    def __init__(self, request: Request, found: Any, after: Callable[[], object] | None = None, source: int = -1):
        super().__init__(found)
        self._request: Request | None = request
        self._after, self.source = after, source

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        request = self._request
        if request is not None:
            if timeout > NO_LIMIT:
                wait_until(request.done, timeout.total_seconds(), lambda: "a message under way to be complete")
            else:
                request.wait()
            self._end()
        return True

    def is_completed(self) -> bool:
        if self._request is not None and self._request.done():
            self._end()
        return self._request is None

    def _end(self) -> None:
        self._request = None
        if self._after is not None:
            self._after()

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank


class FromAnyone(Over):
    """A message that any rank may send; it is received once one has arrived.

    Args:
        comm: the ranks.
        receive: starts to receive it from a rank.
    """

    def __init__(self, comm: Communicator, tag: int, found: Any, receive: Callable[[int], Sent]):
        super().__init__(found)
        self._comm, self._tag, self._receive = comm, tag, receive
        self._taken: Sent | None = None

    def _take(self, block: bool) -> Sent | None:
        if self._taken is None:
            arrived = self._comm.probe(tag=self._tag, block=block)
            self._taken = None if arrived is None else self._receive(arrived.source)
        return self._taken

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        taken = self._take(block=True)
        return taken is not None and taken.wait(timeout)

    def is_completed(self) -> bool:
        taken = self._take(block=False)
        return taken is not None and taken.is_completed()

    def source_rank(self) -> int:
        self.wait()
        return self._taken.source if self._taken is not None else -1

    _source_rank = source_rank


class Several(Over):
    """Several calls, waited for together."""

    def __init__(self, works: Sequence[dist.Work], found: Any):
        super().__init__(found)
        self._works = works

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        for work in self._works:
            work.wait(*([timeout] if timeout > NO_LIMIT else []))
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
