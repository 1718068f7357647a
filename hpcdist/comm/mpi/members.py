"""The living ranks of one communicator, and MPI's communicator of them."""

from __future__ import annotations

from contextlib import suppress

from mpi4py import MPI

from hpcdist.comm.waiting import wait_until
from hpcdist.errors import DeadlineError

NEWS_S = 30.0  # how much later than a broken connection MPI may tell of the death behind it


def meet(mpi: MPI.Intracomm) -> None:
    """Collective among the living. Return once all of them are here, whoever has died; a barrier may then hang."""
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


class Members:
    """The ranks of a communicator that live, and those known to have died.

    Messages between the living, and windows, work on the communicator that a rank died in; only collectives need one
    of the living alone.

    Args:
        mpi: MPI's communicator of all of them.
        tolerant: the library survives a rank that dies, and tells.
    """

    def __init__(self, mpi: MPI.Intracomm, tolerant: bool):
        self.all, self.tolerant = mpi, tolerant
        self.alive: MPI.Intracomm = mpi.Dup() if tolerant else mpi  # for collectives; messages outlive its revocation
        self.living = tuple(range(mpi.Get_size()))
        self.lost: tuple[int, ...] = ()

    def failed(self) -> tuple[int, ...]:
        """Return the ranks that are known to have died. Never blocks."""
        if not self.tolerant:
            return ()
        with suppress(MPI.Exception):  # it notices a death by making progress, and may complain of it
            self.all.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
        dead, everyone = self.all.Get_failed(), self.all.Get_group()
        ranks = MPI.Group.Translate_ranks(dead, None, everyone)
        dead.Free()
        everyone.Free()
        return tuple(sorted(ranks))

    def has_died(self, rank: int) -> bool:
        """Tell whether a connection to `rank` broke because it died, which MPI may report a moment later."""
        with suppress(DeadlineError):
            wait_until(lambda: rank in self.failed(), NEWS_S if self.tolerant else 0.0, str)
            return True
        return False

    def shrink(self) -> None:
        """Collective among the living. Remove the dead from collectives."""
        before, self.alive = self.living, self.all.Shrink()
        meet(self.all)  # Open MPI 5.0 crashes where a communicator is revoked that another rank is still making
        group = self.alive.Get_group()
        self.living = tuple(MPI.Group.Translate_ranks(group, None, self.all.Get_group()))
        self.lost += tuple(rank for rank in before if rank not in self.living)
