"""Going on without ranks that died: User-Level Failure Mitigation, as Open MPI 5 has it (`mpirun --with-ft ulfm`)."""

from __future__ import annotations

from contextlib import suppress

from mpi4py import MPI

from hpcdist.comm.mpi_request import EVERYONE
from hpcdist.errors import CommunicationError


class Surviving:
    """The part of MpiCommunicator that outlives ranks. See Communicator for `failed`, `heal`, `living`.

    Messages between the living, and windows in shared memory, work on the communicator that a rank died in; only
    collectives need one of the living alone, `members`.

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
        dead = self.mpi.Get_failed()
        return tuple(sorted(MPI.Group.Translate_ranks(dead, list(range(dead.size)), self.mpi.Get_group())))

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
                    raise CommunicationError(self._explain("heal", EVERYONE, error)) from error
        if unchanged:
            return ()
        before, self.members = self.living, self.mpi.Shrink()
        group = self.members.Get_group()
        self.living = tuple(MPI.Group.Translate_ranks(group, None, self.mpi.Get_group()))
        return tuple(rank for rank in before if rank not in self.living)
