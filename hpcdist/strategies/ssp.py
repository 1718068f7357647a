"""Let fast workers run ahead of slow ones by a bounded number of steps, then wait: stale synchronous parallel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import final

from pydantic import Field

from hpcdist.strategies.server.channel import NOBODY, ServerRequest
from hpcdist.strategies.server.gradients import Policy, exchange_gradients
from hpcdist.strategies.server.strategy import ServerStrategy


class SSPPolicy(Policy):
    """Let a worker of clock c, its completed steps, read once all clocks are c − s or more; update when one may read.

    An update is of all gradients that have arrived.
    """

    remembers = ("completed",)
    divides_by_workers = True

    def __init__(self, bound: int, workers: Iterable[int]):
        self._bound, self._completed = bound, dict.fromkeys(workers, 0)  # s; each worker's clock

    @property
    def completed(self) -> list[list[int]]:
        """Pairs of a worker and its clock, the form in checkpoints."""
        return list(map(list, self._completed.items()))

    @completed.setter
    def completed(self, saved: Iterable[Sequence[int]]) -> None:
        self._completed = {worker: clock for worker, clock in saved}

    def arrived(self, source: int, staleness: int) -> str | None:
        self._completed[source] += 1
        return None

    def complete(self, held: Sequence[ServerRequest], summed: int, active: Sequence[int]) -> bool:
        return any(self._within_bound(gradient, active) for gradient in held)

    def may_go(self, gradient: ServerRequest, active: Sequence[int]) -> bool:
        return gradient.applied and self._within_bound(gradient, active)

    def _within_bound(self, gradient: ServerRequest, active: Sequence[int]) -> bool:
        """Tell whether c − min(clock) <= s for the clock c of the gradient's worker."""
        least = min((self._completed[worker] for worker in active), default=math.inf)
        return self._completed[gradient.source] - least <= self._bound

    def blocker(self, active: Sequence[int]) -> int:
        return min(active, key=self._completed.__getitem__, default=NOBODY)

    def returned(self, worker: int, active: Sequence[int]) -> None:
        # Nobody waited for its steps while it was evicted: it goes on from the clock of the slowest.
        others = [self._completed[other] for other in active if other != worker]
        self._completed[worker] = max(self._completed[worker], min(others, default=0))


@final
class SSP(ServerStrategy):
    """Bound the number of steps that a worker is ahead of any other when it reads parameters, by `bound`.

    A worker that has completed c steps gets its reply when every other worker has completed c − bound steps. The
    parameters it reads then include all gradients of all workers up to that step, and always its own. So c − min(clock)
    <= bound at every read, whatever the straggler; right after a step it may be one more. The step's record says how
    long the worker waited, and for whom. `bound = 0` is hardsync, bitwise; a large bound never waits.

    Each gradient counts 1/λ for λ workers, so that a step of all of them is one averaged update, for every bound.
    When a worker may read, the server makes an update of all gradients that have arrived. Records have the staleness in
    updates, as with `parameter_server`. Nobody waits for a worker that has ended its epoch.

    Bytes per worker and step: one gradient vector put by the worker, one parameter vector put by the servers.

    Reference: Qirong Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server",
    2013.
    """

    class Config(ServerStrategy.Config):
        """Options of ssp."""

        bound: int = Field(3, ge=0, description="s: number of steps that a worker may be ahead of the slowest one")

    contract = replace(ServerStrategy.contract, averages="gradients")

    def __init__(self, config: Config, comm, model, **kwargs):
        super().__init__(config, comm, model, **kwargs)
        exchange_gradients(self, SSPPolicy(config.bound, self.place.children))
