"""Going on without ranks that died: User-Level Failure Mitigation, as Open MPI 5 has it (`mpirun --with-ft ulfm`)."""

from __future__ import annotations

from contextlib import suppress

from mpi4py import MPI

from hpcdist.comm.mpi_request import EVERYONE
from hpcdist.comm.waiting import wait_until
from hpcdist.errors import CommunicationError, DeadlineError, RankFailedError

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
    """The part of MpiCommunicator that outlives ranks. See Communicator for `failed`, `heal`, `living`.

    Messages between the living, and windows, work on the communicator that a rank died in; only collectives need one
    of the living alone, `members`. A transfer with a rank that has died raises RankFailedError.

    Reference: Wesley Bland et al., "Post-failure recovery of MPI communication capability: design and rationale", 2013.
    """

    tolerant = False  # set once for the process: the job was started so that a rank's death is survived

    def begin_whole(self) -> None:
        """All ranks are alive."""
        self.members: MPI.Intracomm = self.mpi
        self.living = tuple(range(self.size))

    @property
    def whole(self) -> bool:
        """Whether all ranks take part in collectives: nobody has been found dead."""
        return len(self.living) == self.size

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
        died = self.tolerant and error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)
        return (RankFailedError if died else CommunicationError)(self._explain(what, peer, error))

    def heal(self) -> tuple[int, ...]:
        if not self.tolerant:
            return ()
        while True:
            dead = self.failed()
            self.mpi.Ack_failed(len(dead))
            try:
                unchanged = self.mpi.Agree(int(not set(dead) & set(self.living)))
                break
            except MPI.Exception as error:  # somebody knew of another death
                if error.Get_error_class() != MPI.ERR_PROC_FAILED:
                    raise self.failure("heal", EVERYONE, error) from error
        if unchanged:
            return ()
        before, self.members = self.living, self.mpi.Shrink()
        group = self.members.Get_group()
        self.living = tuple(MPI.Group.Translate_ranks(group, None, self.mpi.Get_group()))
        return tuple(rank for rank in before if rank not in self.living)
