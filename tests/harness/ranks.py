"""What the fixture `ranks` gives: one body, run on every rank, virtual or real."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from harness import job as jobs
from harness.job import Job
from hpcdist.errors import RankFailedError

if TYPE_CHECKING:  # takes torch in, which is slow, and not every test wants it
    from hpcdist.comm.communicator import Communicator

Body = Callable[["Communicator"], Any]
RAISED = (Exception, pytest.fail.Exception, pytest.skip.Exception)  # the last two are no Exceptions


class RealRanks:
    """Runs bodies once on all ranks of the job; each call has a communicator of its own."""

    real = True

    def __init__(self, job: Job):
        self._job, self.size, self._calls = job, job.size, 0

    def __call__(self, body: Body, *, seed: int = 0, network: object = None, compute: object = None) -> list[Any]:
        """Collective. What `body(comm)` returned on every rank, in rank order.

        If it raised on some ranks, it raises on all: a rank's own exception, else that of the lowest rank that has
        one. `seed`, `network` and `compute` are for virtual ranks.
        """
        __tracebackhide__ = True
        self._calls += 1
        self._job.meet(f"before call {self._calls} of ranks(...)")
        comm = self._job.communicator()
        error, result = None, b""
        try:
            result = pickle.dumps(body(comm))
        except RAISED as raised:
            error = raised
        part, trace = (jobs.FAILED, _text(error)) if error else (jobs.PASSED, "")
        parts = self._job.meet(f"after call {self._calls} of ranks(...)", part, trace)
        if len(set(parts)) == 1:  # where only some raised, closing might wait for messages that never come
            comm.close()
        if jobs.FAILED in parts:
            self._raise(error)
        return [pickle.loads(r) for r in self._job.gather(result)]

    def _raise(self, own: BaseException | None) -> None:
        """Collective. Raises this rank's own error, or the first other rank's."""
        __tracebackhide__ = True
        sent = None if own is None else (own if jobs.survives_pickling(own) else None, _text(own))
        found = [(rank, *what) for rank, what in enumerate(self._job.gather(sent)) if what is not None]
        if own is not None:
            raise own
        rank, error, text = found[0]
        cause = RankFailedError(f"rank {rank} raised:\n{text}")
        error = error or cause
        error.echoed = True
        raise error from (None if error is cause else cause)


class VirtualRanks:
    """Runs bodies on virtual ranks, in this process."""

    real = False

    def __init__(self, size: int):
        self.size = size

    def __call__(self, body: Body, **simulation: Any) -> list[Any]:
        """What `body(comm)` returned on every rank, in rank order. Options are those of `run_virtual`."""
        from hpcdist.comm.virtual import run_virtual

        return run_virtual(body, self.size, **simulation)


def is_echo(error: BaseException) -> bool:
    """True if this rank raised only because another rank did."""
    return getattr(error, "echoed", False)


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
