"""Fast workers may be ahead of slow workers by a bounded number of steps: stale synchronous parallel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import final

from hpcdist.config.settings import Field
from hpcdist.strategies.server.channel import NOBODY, ServerRequest
from hpcdist.strategies.server.gradients import GradientStrategy, Policy


class SSPPolicy(Policy):
    """A worker with c completed steps may read once all workers have completed c − s steps, for the bound s.

    When a worker may read, the server updates with all gradients that have arrived.
    """

    remembers = ("completed",)
    divides_by_workers = True

    def __init__(self, bound: int, workers: Iterable[int]):
        self._bound, self._completed = bound, dict.fromkeys(workers, 0)  # s; each worker's completed steps

    @property
    def completed(self) -> list[list[int]]:
        """Pairs (worker, clock), as in checkpoints."""
        return list(map(list, self._completed.items()))

    @completed.setter
    def completed(self, saved: Iterable[Sequence[int]]) -> None:
        self._completed = {worker: clock for worker, clock in saved}

    def arrived(self, source: int, staleness: int) -> str | None:
        self._completed[source] += 1
        return None

    def complete(self, gradients: Sequence[ServerRequest], summed: int, active: Sequence[int]) -> bool:
        return any(self._within_bound(gradient, active) for gradient in gradients)

    def may_go(self, gradient: ServerRequest, active: Sequence[int]) -> bool:
        return gradient.applied and self._within_bound(gradient, active)

    def _within_bound(self, gradient: ServerRequest, active: Sequence[int]) -> bool:
        """Return whether c − min(clock) <= s for the clock c of the gradient's worker."""
        slowest = min((self._completed[worker] for worker in active), default=math.inf)
        return self._completed[gradient.source] - slowest <= self._bound

    def blocker(self, active: Sequence[int]) -> int:
        return min(active, key=self._completed.__getitem__, default=NOBODY)

    def returned(self, worker: int, active: Sequence[int]) -> None:
        # An evicted worker was not waited for: it continues from the slowest worker's clock.
        other_clocks = [self._completed[other] for other in active if other != worker]
        self._completed[worker] = max(self._completed[worker], min(other_clocks, default=0))


@final
class SSP(GradientStrategy):
    """Limit how many steps a worker may be ahead of the slowest worker when it reads parameters, by `bound`.

    A worker that has completed c steps gets its reply when every other worker has completed c − bound steps. Its new
    parameters then include all gradients of all workers up to that step, and all its own. So c − min(clock) <= bound
    at every read, whatever the straggler; right after a step it may be one more. A step's record contains how long the
    worker waited for each other worker. `bound = 0` is hardsync, bitwise; with a large bound no worker waits.

    Each gradient has weight 1/λ for λ workers, so that one step of all workers is one averaged update, for every bound.
    When a worker may read, the server updates with all gradients that have arrived. Records have the staleness in
    updates, as with `parameter_server`. No worker waits for one that has ended its epoch.

    Bytes per worker and step: one gradient vector put by the worker, one parameter vector put by the servers.

    Example on 3 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "ssp", bound=3)

    Reference: Qirong Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server",
    2013.
    """

    class Config(GradientStrategy.Config):
        bound: int = Field(3, "s: number of steps that a worker may be ahead of the slowest worker", ge=0)

    config: Config
    contract = replace(GradientStrategy.contract, averages="gradients")

    def policy(self) -> SSPPolicy:
        return SSPPolicy(self.config.bound, self.replica.children)
