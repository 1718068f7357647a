"""n-softsync: an update is made of every ⌊λ/n⌋ gradients, from whichever workers they come; nobody waits."""

from __future__ import annotations

from typing import final

from pydantic import Field

from hpcdist.errors import ConfigError
from hpcdist.strategies.families.gradients import Held, Stale


@final
class Softsync(Stale):
    """SGD through servers that update with the mean of c = ⌊λ/n⌋ gradients of any workers: one may give two.

    A worker posts its gradient and goes on at once with the parameters as they are. n = 1 makes updates of λ
    gradients, but is not hardsync, since nobody waits: staleness is 0, 1 or 2. n = λ is the asynchronous
    `parameter_server`. The mean staleness is (λ − 1)/c when each worker pulls right after its gradient is taken, "about
    n"; one below 2n holds for workers of about equal speed, not by protocol: `max_staleness` gives a hard bound.
    `modulation = "average"` divides the learning rate by n. Aggregators answer with what they were given last, which
    adds less than n updates of staleness per level of a tree; `overlap` adds n.

    Gradients that wait for their update at the end of an epoch are part of the next one's first update.

    Bytes per worker and step: one gradient vector put by the worker, one parameter vector put by the servers.

    Reference: Suyog Gupta, Wei Zhang, Fei Wang, "Model accuracy and runtime tradeoff in distributed deep learning: a
    systematic study", 2016, section 3, equations 4 to 6.
    """

    class Config(Stale.Config):
        """Options of softsync."""

        splits: int = Field(1, ge=1, description="n: an update is made of every workers/n gradients, rounded down")
        fan_in: int | None = Field(
            None, ge=2, description="workers post to aggregators, each of at most so many children, in a tree; or none"
        )

    def __init__(self, config: Config, comm, model):
        super().__init__(config, comm, model)
        workers = len(self.roles.workers)
        if config.splits > workers and comm.size > 1:
            raise ConfigError(
                f"strategy.splits must be at most the number of workers, {workers}; got {config.splits}. Use fewer "
                "splits, or more ranks."
            )
        self._quota = max(1, workers // config.splits)
        self._averages = self._quota > 1
        if self.roles.aggregators:
            self._check_tree(config)
            if self.parents and self.children:
                self._quota = _group(self._quota, config.fan_in, self._height())

    def _check_tree(self, config: Config) -> None:
        if config.modulation not in ("none", "average") or config.max_staleness is not None:
            raise ConfigError(
                "strategy.fan_in must go with modulation none or average and without max_staleness, since aggregators "
                f"sum gradients before their staleness is known; got modulation {config.modulation}, max_staleness "
                f"{config.max_staleness}. Leave fan_in out."
            )

    def _height(self) -> int:
        """Of an aggregator: 1 above workers, 2 above such aggregators..."""
        height, rank = 0, self.comm.rank
        while rank not in self.roles.workers:
            height, rank = height + 1, self.roles.children(rank)[0]
        return height

    def complete(self) -> bool:
        waiting = sum(len(held.letter.clocks) for held in self.held if not held.added)
        return len(self.store.clocks) + waiting >= self._quota

    def weight(self) -> float:
        return self.model.weight if self._averages else 1.0

    def may_go(self, held: Held) -> bool:
        return True

    def expected_staleness(self) -> float:
        return self.config.splits


def _group(quota: int, fan_in: int, height: int) -> int:
    """How many gradients an aggregator sums: as many as fit, so that whole sums make up an update's quota."""
    size = 1
    for _ in range(height):
        size = max(n for n in range(size, min(quota, size * fan_in) + 1) if quota % n == 0 and n % size == 0)
    return size
