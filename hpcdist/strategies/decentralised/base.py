"""Train without servers: all ranks are alike, and the others go on without one that dies.

That needs a launcher that lets them live, `mpirun --with-ft ulfm`. A rank finds a death out by itself, once a step or
when a transfer fails, so different ranks may know of it from different steps on. Decisions of one rank go by the ranks
it has `present`; draws and sums that must be alike go by `comm.failures.living`, which changes where all shrink
together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from hpcdist.comm.communicator import Request
from hpcdist.errors import RankFailedError
from hpcdist.records import StepRecord
from hpcdist.strategies.base import Outcome, Strategy, Update
from hpcdist.strategies.common.contract import Contract


class Decentralised(Strategy):
    """Collective. Train replicas, one per rank, none of which is needed by the others.

    Of every rank that dies each of the others has one record that names it.
    """

    class Config(Strategy.Config):
        """Options of decentralised strategies."""

        def needed(self, size: int) -> tuple[int, ...]:
            return ()

    contract = Contract(averages="parameters", meets="never", deaths="others go on")

    def __init__(self, config: Strategy.Config, comm, model, **given):
        super().__init__(config, comm, model, **given)
        self.present = comm.failures.living  # ranks not known to have died
        self._named: set[int] = set()  # in a record
        self.records.remarks = self._name_lost

    def step(self, update: Update, **how) -> StepRecord:
        self.look()
        return super().step(update, **how)

    def _name_lost(self) -> list[str]:
        lost = self._unnamed()
        self._named.update(lost)
        return [f"goes on without rank {rank}: it has died" for rank in lost]

    def shrink(self) -> None:
        super().shrink()
        self.look()
        if self._unnamed():  # died after the last step
            self.records.report(self.steps, Outcome(clock=self.steps))

    def look(self) -> None:
        """Update `present` by the ranks that are known to have died. Never waits."""
        dead = self.comm.failures.failed()
        self.present = (
            tuple(rank for rank in self.comm.failures.living if rank not in dead) if dead else self.comm.failures.living
        )

    def _unnamed(self) -> list[int]:
        return [r for r in range(self.comm.size) if r not in self.present and r not in self._named]

    # --- transfers that outlive the rank at the other end ---------------------------------------------------------
    def survives(self, transfer: Callable[..., object], *args) -> bool:
        """Make a transfer with another rank; return False if that one has died, and the transfer may be half done."""
        try:
            transfer(*args)
        except RankFailedError:
            self.look()
            return False
        return True

    def exchange(self, sent: Sequence[Tensor], dest: int, received: Sequence[Tensor], source: int) -> bool:
        """Send tensors to `dest` while receiving others from `source`; return True if all of those have come.

        If one of the two dies, the transfer with the other is still made. Tensors received in part must not be used.
        """
        arriving: list[Request] = []
        leaving: list[Request] = []
        begun = [self.survives(lambda t=t: arriving.append(self.comm.irecv(t, source))) for t in received]
        for tensor in sent:
            self.survives(lambda t=tensor: leaving.append(self.comm.isend(t, dest)))
        come = [self.survives(request.wait) for request in arriving]
        for request in leaving:
            self.survives(request.wait)
        return all(begun) and all(come)
