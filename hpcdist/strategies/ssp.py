"""Stale synchronous parallel: fast workers run ahead of slow ones by a bounded number of steps, then wait."""

from __future__ import annotations

import math
from typing import final

from pydantic import Field

from hpcdist.server.mailbox import NOBODY, Letter
from hpcdist.strategies.families.gradients import Gradients, Held


@final
class SSP(Gradients):
    """Bounded staleness: a worker's clock counts its steps, and no worker reads more than `bound` ahead of another.

    A worker that has completed c steps is answered once every other one has completed c − bound: what it reads
    includes all gradients of all workers up to that step, its own always. So c − min(clock) <= bound at every read,
    under any straggler; right after a step it may be one more. The step's record tells how long the worker was held
    up, and by whom. `bound = 0` is hardsync, bitwise; a large bound never waits.

    Each gradient counts 1/λ for λ workers, so that a step of all of them is one averaged update, for every bound.
    The server makes an update when somebody may read, of all gradients that have arrived by then. The staleness in the
    records is that of `parameter_server`, in updates. A worker that has ended its epoch holds nobody up.

    Bytes per worker and step: one gradient vector put by the worker, one parameter vector put by the servers.

    Reference: Qirong Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server",
    2013.
    """

    class Config(Gradients.Config):
        """Options of ssp."""

        bound: int = Field(
            3, ge=0, description="s: steps by which a worker may be ahead of the slowest when it reads parameters"
        )

    joins = True

    def __init__(self, config: Config, comm, model):
        super().__init__(config, comm, model)
        self._completed = dict.fromkeys(self.children, 0)  # steps by worker

    def receive(self, letter: Letter) -> None:
        self._completed[letter.source] += 1
        super().receive(letter)

    def child_returned(self, child: int) -> None:
        # Its steps while it was left out were nobody's to wait for.
        others = [self._completed[rank] for rank in self.active() if rank != child]
        self._completed[child] = max(self._completed[child], min(others, default=0))

    def _slowest(self) -> int:
        """The rank that has completed the fewest steps, of those that still take some."""
        return min(self.active(), key=lambda rank: self._completed[rank], default=NOBODY)

    def _legal(self, held: Held) -> bool:
        least = min((self._completed[rank] for rank in self.active()), default=math.inf)
        return self._completed[held.letter.source] - least <= self.config.bound

    def complete(self) -> bool:
        return any(self._legal(held) for held in self.held)

    def may_go(self, held: Held) -> bool:
        return held.applied and self._legal(held)

    def blocker(self, held: Held) -> int:
        return self._slowest()

    def divisor(self) -> float:
        return len(self.roles.workers) - len(self.left_out)

    def state(self) -> dict:
        return {**super().state(), "completed": [[rank, steps] for rank, steps in self._completed.items()]}

    def load_state(self, state: dict) -> None:
        super().load_state(state)
        self._completed.update(state.get("completed", []))
