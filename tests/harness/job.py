"""The ranks of the job as the harness sees them, on a communicator of its own, apart from those under test."""

from __future__ import annotations

import os
import pickle
import time
import zlib
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from mpi4py import MPI

from harness.console import Console

if TYPE_CHECKING:  # takes torch in
    from hpcdist.comm.mpi.communicator import MpiCommunicator

# A rank's part in a verdict. AWAY: the test does not use it. ECHOED: raised because another rank did.
AWAY, PASSED, SKIPPED, ECHOED, FAILED = range(5)
SETTLE_S = 1.0  # time for the other ranks to show what they have to say before the job is ended
SHORTEST_S, LONGEST_S = 50e-6, 5e-3


class Job:
    """Collective. All ranks that the launcher started, or the first ones of them.

    Args:
        console: where this rank writes what must be seen even when output is captured.
        grace_s: how long a rank that has failed waits for the others before it ends the job.
        within: the communicator of these ranks.
    """

    def __init__(self, console: Console, grace_s: float, within: MPI.Intracomm = MPI.COMM_WORLD):
        self._mpi = within.Dup()
        self.rank, self.size = self._mpi.Get_rank(), self._mpi.Get_size()
        self.library = " ".join(MPI.Get_library_version().strip("\0").split("\n")[0].split(",")[0].split())
        self.console, self.grace_s = console, grace_s
        self._parts: dict[int, Job] = {}
        self._whole: MpiCommunicator | None = None

    def part(self, size: int) -> Job:
        """Collective. The job of the first `size` ranks; on the other ranks, that of those."""
        if size == self.size:
            return self
        if size not in self._parts:
            side = int(self.rank >= size)
            self._parts[size] = made = Job(self.console, self.grace_s, self._mpi.Split(side))
            made._whole = _world().split(side)
        return self._parts[size]

    def communicator(self) -> MpiCommunicator:
        """Collective. A new communicator of the library's for these ranks."""
        return (self._whole or _world()).split(0)

    def meet(self, place: str, part: int = PASSED, failure: str = "") -> list[int]:
        """Collective. Every rank's part, once all of them have come to the same place of the same test.

        A rank with a `failure` to tell does not wait for ever: others may be blocked in a communication with it. It
        tells it and ends the job after the grace period. So do all ranks that find themselves at different places.
        """
        own = np.array([zlib.crc32(place.encode()), part], np.int64)
        found = np.empty((self.size, 2), np.int64)
        request, start, pause_s = self._mpi.Iallgather(own, found), time.perf_counter(), SHORTEST_S
        while not request.Test():
            if failure and time.perf_counter() - start > self.grace_s:
                self.end(f"{failure}\nFailed {place}; the other ranks did not come there within {self.grace_s:g} s.")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_S)
        if len(set(found[:, 0].tolist())) > 1:
            self.end(f"{failure}\nThe ranks are at different places of the test; this one is {place}.".strip())
        return found[:, 1].tolist()

    def gather(self, value: Any) -> list[Any]:
        """Collective. Every rank's value (which must survive pickling) in rank order, on every rank."""
        return self._mpi.allgather(value)

    def end(self, text: str, status: int = 1) -> NoReturn:
        """Shows `text` labelled with this rank, gives the others time to do the same, and ends all ranks."""
        self.console.write(f"{text}\nEnding the job.")
        time.sleep(SETTLE_S)
        MPI.COMM_WORLD.Abort(status)
        os._exit(status)  # for an MPI whose abort returns


def _world() -> MpiCommunicator:
    from hpcdist.comm.mpi.world import world

    return world()


def survives_pickling(value: Any) -> bool:
    """True if another rank can be sent `value`."""
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:  # whatever a class's own pickling code raises
        return False
    return True
