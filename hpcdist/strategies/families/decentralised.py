"""Strategies without servers: all ranks are alike, and the others go on without one that dies.

That needs a launcher that lets them live, `mpirun --with-ft ulfm`. A rank finds a death out by itself, once a step or
when a transfer fails, so different ranks may know of it from different steps on. What a rank decides alone goes by
those it has `present`; what all must draw or sum alike goes by `comm.living`, which changes where all heal together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from hpcdist.comm.communicator import Request
from hpcdist.errors import RankFailedError
from hpcdist.records import StepRecord
from hpcdist.strategies.base import Outcome, Strategy, Update


class Decentralised(Strategy):
    """Collective. A strategy whose ranks each have a replica, and need none of the others in particular.

    Of every rank that dies each of the others has one record that names it.
    """

    def __init__(self, config: Strategy.Config, comm, model):
        super().__init__(config, comm, model)
        self.present = comm.living  # ranks not known to have died
        self._named: set[int] = set()  # in a record

    def step(self, update: Update) -> StepRecord:
        self.look()
        return super().step(update)

    def record(self, outcome: Outcome) -> StepRecord:
        lost = self._unnamed()
        self._named.update(lost)
        events = [outcome.event] * bool(outcome.event) + [f"goes on without rank {r}: it has died" for r in lost]
        return super().record(replace(outcome, event="; ".join(events) or None))

    @property
    def needed(self) -> tuple[int, ...]:
        return ()

    def heal(self) -> None:
        super().heal()
        self.look()
        if self._unnamed() and self.on_record is not None:  # whoever died after the last step
            self.on_record(self.record(Outcome(clock=self.steps)))

    def look(self) -> None:
        """Finds out who is present. Never waits."""
        dead = self.comm.failed()
        self.present = tuple(rank for rank in self.comm.living if rank not in dead) if dead else self.comm.living

    def _unnamed(self) -> list[int]:
        return [r for r in range(self.comm.size) if r not in self.present and r not in self._named]

    # --- transfers that outlive the rank at the other end ---------------------------------------------------------
    def survives(self, transfer: Callable[..., object], *args) -> bool:
        """Makes a transfer with another rank; False if that one has died, and the transfer may be half done."""
        try:
            transfer(*args)
        except RankFailedError:
            self.look()
            return False
        return True

    def exchange(self, sent: Sequence[Tensor], dest: int, received: Sequence[Tensor], source: int) -> bool:
        """Sends tensors to `dest` while receiving others from `source`; whether all of those have come.

        If one of the two dies, the other still has its part. What has come in part is not to be used.
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
