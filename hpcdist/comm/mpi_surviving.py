"""Going on without ranks that died: User-Level Failure Mitigation, as Open MPI 5 has it (`mpirun --with-ft ulfm`)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from mpi4py import MPI

from hpcdist.comm.mpi_request import EVERYONE
from hpcdist.comm.waiting import wait_until
from hpcdist.errors import CommunicationError, DeadlineError, RankFailedError

T = TypeVar("T")
GIVE_WAY_S = 2.0  # how long mpirun may take to end the others
NEWS_S = 5.0  # how much later than a broken connection MPI may tell of the death behind it


def meet(mpi: MPI.Intracomm) -> None:
    """Collective among the living. Returns once all of them are here, whoever has died; a barrier may then hang."""
    while True:
        dead = mpi.Get_failed()
        mpi.Ack_failed(dead.size)
        dead.Free()
        try:
            mpi.Agree(1)
            return
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_PROC_FAILED:  # somebody knew of another death
                raise


class Surviving:
    """The part of MpiCommunicator that outlives ranks. See Communicator for `failed`, `heal`, `surviving`, `living`.

    Messages between the living, and windows, work on the communicator that a rank died in; only collectives need one
    of the living alone, `members`. A transfer with a rank that has died raises RankFailedError. A collective does so
    on some ranks only, and others wait for these (whoever fails revokes `members`, so that all leave) or get what is
    incomplete without an error, as from Open MPI 5.0's MPI_Allgatherv. So nothing counts before all agree that none
    has died.

    Reference: Wesley Bland et al., "Post-failure recovery of MPI communication capability: design and rationale", 2013.
    """

    tolerant = False  # set once for the process: the job was started so that a rank's death is survived

    def begin_whole(self) -> None:
        """All ranks are alive."""
        self.members: MPI.Intracomm = self.mpi.Dup() if self.tolerant else self.mpi  # messages outlive its revocation
        self.living = tuple(range(self.size))

    def failed(self) -> tuple[int, ...]:
        if not self.tolerant:
            return ()
        with suppress(MPI.Exception):  # it notices a death by making progress, and may complain of it
            self.mpi.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
        dead, everyone = self.mpi.Get_failed(), self.mpi.Get_group()
        ranks = MPI.Group.Translate_ranks(dead, None, everyone)
        dead.Free()
        everyone.Free()
        return tuple(sorted(ranks))

    def has_died(self, rank: int) -> bool:
        """Whether a connection to `rank` broke because it died: of that MPI may tell a moment later."""
        with suppress(DeadlineError):
            wait_until(lambda: rank in self.failed(), NEWS_S if self.tolerant else 0.0, str)
            return True
        return False

    def failure(self, what: str, peer: int, error: MPI.Exception) -> CommunicationError:
        """The error of the seam for one of MPI's."""
        deaths = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
        died = self.tolerant and error.Get_error_class() in deaths
        return (RankFailedError if died else CommunicationError)(self._explain(what, peer, error))

    def heal(self) -> None:
        if self.tolerant:
            self._agree(True)

    def surviving(self, action: Callable[[], T], *others: Surviving) -> T:
        if not self.tolerant:
            return action()
        self.heal()
        while True:
            before, error = self.living, None
            try:
                result = action()
            except Exception as failure:  # whatever it is: incomplete data may have been used
                error = failure
                for comm in (self, *others):
                    comm.members.Revoke()
            done = self._agree(error is None)
            if self.living == before:
                break
        if not done:
            raise error or CommunicationError(
                f"a call of all ranks on {self.name} succeeded on rank {self.rank} and failed on another, though none "
                "has died. That rank's message says why."
            )
        return result

    def end_alone(self, status: int) -> None:
        """Ends this rank where one has died: those that fail alike do the same, and others go on without it.

        Where none has, leaves it to lower ranks for a while to end the job: then they were not about to. For Open MPI's
        mpirun hangs, or has the exit status 0, where several ranks end a job at once, or one in which another has died.
        """
        if self.failed():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        time.sleep(GIVE_WAY_S * min(self.rank, 3))

    def _agree(self, done: bool) -> bool:
        """Collective among the living. Whether all are `done`; `living` and `members` are without the dead then."""
        self.calls += 1
        with self.blocked("heal", EVERYONE, self.deadline_s):
            while True:
                dead = self.failed()
                self.mpi.Ack_failed(len(dead))
                whole = not set(dead) & set(self.living) and not self.members.Is_revoked()
                try:
                    found = self.mpi.Agree(done | whole << 1)  # of each bit whether all ranks have it
                    break
                except MPI.Exception as error:  # somebody knew of another death
                    if error.Get_error_class() != MPI.ERR_PROC_FAILED:
                        raise self.failure("heal", EVERYONE, error) from error
            if not found & 2:
                self._shrink()
        return bool(found & 1)

    def _shrink(self) -> None:
        before, self.members = self.living, self.mpi.Shrink()
        group = self.members.Get_group()
        self.living = tuple(MPI.Group.Translate_ranks(group, None, self.mpi.Get_group()))
        self.lost += tuple(rank for rank in before if rank not in self.living)
        self.calls = 0  # ranks may have failed in different ones
