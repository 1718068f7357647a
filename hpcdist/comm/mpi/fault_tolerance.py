"""Going on without ranks that died: User-Level Failure Mitigation, as Open MPI 5 has it (`mpirun --with-ft ulfm`)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from mpi4py import MPI

from hpcdist import log
from hpcdist.comm.capabilities import Failures
from hpcdist.comm.mpi.calls import EVERYONE, Calls, Members, meet
from hpcdist.comm.waiting import wait_until
from hpcdist.errors import CommunicationError, DeadlineError, RankFailedError

T = TypeVar("T")
GIVE_WAY_S = 2.0  # how long mpirun may take to end the others


@contextmanager
def all_needed(tolerant: bool) -> Iterator[None]:
    """Collective. End every rank where one dies inside the context; one of them prints the reason.

    Args:
        tolerant: the library survives a rank that dies, and tells; else the launcher ends all of them.
    """
    try:
        if tolerant:
            meet(MPI.COMM_WORLD)  # before collectives that complain of a death in words of their own
        if not tolerant or not _dead():
            yield
            return
    except (MPI.Exception, RankFailedError):
        if not tolerant or not _dead():
            raise
    _end_where_all_are_needed(_dead())


def _dead() -> list[int]:
    """Return the ranks of the job that are known to have died."""
    dead, everyone = MPI.COMM_WORLD.Get_failed(), MPI.COMM_WORLD.Get_group()
    return sorted(MPI.Group.Translate_ranks(dead, None, everyone))


def _end_where_all_are_needed(dead: Sequence[int]) -> None:
    rank = MPI.COMM_WORLD.Get_rank()
    if rank == min(set(range(MPI.COMM_WORLD.Get_size())) - set(dead)):
        who = f"rank {dead[0]} has" if len(dead) == 1 else f"ranks {', '.join(map(str, dead))} have"
        log.before_end(
            f"{who} died before all ranks had met in hpcdist.init(), where each of them is needed. See what it said "
            "last, and start the job again. Ending the job.",
        )
    else:
        time.sleep(GIVE_WAY_S)  # or that rank would count this one among the dead
    sys.stdout.flush()
    os._exit(1)


class FaultTolerance(Failures):
    """Agreement of a communicator's living ranks on the dead ones, and repetition of calls that a death has spoiled.

    A transfer with a rank that has died raises RankFailedError. A collective does so on some ranks only, and others
    wait for these (whoever fails revokes the communicator of the living, so that all leave) or get what is incomplete
    without an error, as from Open MPI 5.0's MPI_Allgatherv. So nothing counts before all agree that none has died.

    Args:
        members: the communicator's ranks.
        calls: those made on it.

    Reference: Wesley Bland et al., "Post-failure recovery of MPI communication capability: design and rationale", 2013.
    """

    def __init__(self, members: Members, calls: Calls):
        self._members, self._calls = members, calls
        self.tolerant = members.tolerant

    @property
    def deadline_s(self) -> float:  # type: ignore[override]
        return self._calls.deadline_s

    @deadline_s.setter
    def deadline_s(self, seconds: float) -> None:
        self._calls.deadline_s = seconds

    @property
    def living(self) -> tuple[int, ...]:  # type: ignore[override]
        return self._members.living

    @property
    def lost(self) -> tuple[int, ...]:  # type: ignore[override]
        return self._members.lost

    def failed(self) -> tuple[int, ...]:
        return self._members.failed()

    def whereabouts(self) -> str:
        return self._calls.whereabouts()

    def shrink(self) -> None:
        if self.tolerant:
            self._agree(True)

    def retry_on_failure(self, action: Callable[[], T], *others: Failures) -> T:
        if not self.tolerant:
            return action()
        self.shrink()
        while True:
            before, error = self._members.living, None
            try:
                result = action()
            except Exception as failure:  # whatever it is: incomplete data may have been used
                error = failure
                for failures in (self, *others):
                    if isinstance(failures, FaultTolerance):
                        failures._members.alive.Revoke()
            done = self._agree(error is None)
            if self._members.living == before:
                break
        if not done:
            raise error or CommunicationError(
                f"a call of all ranks on {self._calls.name} succeeded on rank {self._calls.rank} and failed on "
                "another, though none has died. That rank's message says why."
            )
        return result

    def end_alone(self, status: int) -> None:
        """End this rank alone where another one has died; ranks that fail alike do the same, others go on.

        Where none has, leave it to lower ranks for a while to end the job, and to news of a death to come. For Open
        MPI's mpirun hangs, or has the exit status 0, where several ranks end a job at once, or one in which another has
        died.
        """
        with suppress(DeadlineError):
            wait_until(lambda: bool(self._members.failed()), GIVE_WAY_S * min(self._calls.rank, 3), str)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _agree(self, done: bool) -> bool:
        """Collective among the living. Tell whether all are `done`, and shrink the group to the living."""
        members, calls = self._members, self._calls
        calls.count += 1
        with calls.blocked("shrink", EVERYONE, calls.deadline_s):
            while True:
                dead = members.failed()
                members.all.Ack_failed(len(dead))
                whole = not set(dead) & set(members.living) and not members.alive.Is_revoked()
                try:
                    agreed = members.all.Agree(done | whole << 1)  # of each bit whether all ranks have it
                    break
                except MPI.Exception as error:  # somebody knew of another death
                    if error.Get_error_class() != MPI.ERR_PROC_FAILED:
                        raise calls.failure("shrink", EVERYONE, error) from error
            if not agreed & 2:
                members.shrink()
                calls.count = 0  # ranks may have failed in different ones
        return bool(agreed & 1)
