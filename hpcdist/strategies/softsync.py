"""Update after every ⌊λ/n⌋ gradients of any of the λ workers; no worker waits: n-softsync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from hpcdist.comm.communicator import Communicator
from hpcdist.config.settings import Field
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.server.channel import ServerRequest
from hpcdist.strategies.server.gradients import GradientStrategy
from hpcdist.strategies.server.placement import FanIn
from hpcdist.strategies.server.stale import OF_EACH_GRADIENT, StaleConfig, StalePolicy


class SoftsyncPolicy(StalePolicy):
    """Update with every c = ⌊λ/n⌋ gradients; no worker waits for others. The expected staleness is n."""

    def __init__(self, config: Softsync.Config, quota: int):
        super().__init__(config, expected=config.splits)
        self._quota = quota  # c

    def complete(self, gradients: Sequence[ServerRequest], summed: int, active: Sequence[int]) -> bool:
        return summed + sum(len(gradient.clocks) for gradient in gradients if not gradient.added) >= self._quota


@final
class Softsync(GradientStrategy):
    """Update after every c = ⌊λ/n⌋ gradients, for λ workers and `splits` = n, whichever workers sent them.

    A fast worker may contribute twice to an update. A worker pushes its gradient and continues immediately with the
    current parameters. With n = 1 an update uses λ gradients, but differs from hardsync, because no worker waits: the
    staleness is 0, 1 or 2. n = λ is the asynchronous `parameter_server`. The mean staleness is about n, or (λ − 1)/c if
    each worker pulls right after the server receives its gradient. While workers are about equally fast no gradient is
    staler than 2n; `max_staleness` guarantees a bound. `modulation = "average"` divides the learning rate by n;
    `"measured"` divides it by the mean staleness of the server's last `modulation_window` gradients, if above 1.
    Aggregators (`fan_in`) reply with their latest parameters, which adds less than n updates of staleness for each
    level of the tree; `overlap` adds n.

    Gradients that remain at the end of an epoch are part of the first update of the next epoch.

    Bytes per worker and step: one gradient vector put by the worker, one parameter vector put by the servers.

    Example on 3 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "softsync", splits=2, max_staleness=4)

    Reference: Suyog Gupta, Wei Zhang, Fei Wang, "Model accuracy and runtime tradeoff in distributed deep learning: a
    systematic study", 2016, section 3, equations 4 to 6.
    """

    class Config(StaleConfig):
        splits: int = Field(1, "n: the server updates after every ⌊workers/n⌋ gradients", ge=1)
        fan_in: FanIn = None

        def quota(self, workers: int) -> int:
            """Compute c, the number of gradients of an update: ⌊λ/n⌋."""
            return max(1, workers // self.splits)

        def averages(self, workers: int) -> bool:
            return self.quota(workers) > 1

    config: Config
    contract = replace(GradientStrategy.contract, averages="gradients")

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        workers = len(self.roles.workers)
        if config.splits > workers and comm.size > 1:
            raise ConfigError(
                f"strategy.splits must be at most the number of workers, {workers}; got {config.splits}. Use fewer "
                "splits, or more ranks."
            )
        uses_each = config.modulation in OF_EACH_GRADIENT or config.max_staleness is not None
        if self.roles.aggregators and uses_each:
            raise ConfigError(
                "strategy.fan_in must go with modulation none, average or measured and without max_staleness, since "
                f"aggregators sum gradients before their staleness is known; got modulation {config.modulation}, "
                f"max_staleness {config.max_staleness}. Leave fan_in out."
            )

    def policy(self) -> SoftsyncPolicy:
        quota = self.config.quota(len(self.roles.workers))
        if self.config.fan_in is not None and self.replica.aggregates:
            quota = _group(quota, self.config.fan_in, self.roles.height(self.comm.rank))
        return SoftsyncPolicy(self.config, quota)


def _group(quota: int, fan_in: int, height: int) -> int:
    """Return how many gradients an aggregator sums: the largest divisor of `quota` that `fan_in` children send."""
    size = 1
    for _ in range(height):
        size = max(n for n in range(size, min(quota, size * fan_in) + 1) if quota % n == 0 and n % size == 0)
    return size
