"""Wait for one gradient of every worker, then update, and let all workers go on together: hardsync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from hpcdist.strategies.server.channel import ServerRequest
from hpcdist.strategies.server.gradients import Policy, exchange_gradients
from hpcdist.strategies.server.placement import FanIn
from hpcdist.strategies.server.strategy import ServerStrategy


class HardsyncPolicy(Policy):
    """Update with one gradient of every worker that still takes steps; drop gradients of older parameters."""

    def complete(self, held: Sequence[ServerRequest], summed: int, active: Sequence[int]) -> bool:
        return bool(held) and {gradient.source for gradient in held} >= set(active)

    def may_go(self, gradient: ServerRequest, active: Sequence[int]) -> bool:
        return gradient.applied

    def arrived(self, source: int, staleness: int) -> str | None:
        return f"dropped: a gradient of rank {source} missed {staleness} updates" if staleness else None


@final
class Hardsync(ServerStrategy):
    """Update with the mean of one gradient of each worker: synchronous SGD through servers.

    Equals `allreduce`, and one process with the batches of all workers together; the sum is taken in rank order. No
    gradient is stale. The servers do not wait for an evicted worker (`learner_deadline_s`) or a dead one: updates are
    made of the remaining workers' gradients, weighted by their samples. The next gradient of an evicted worker, which
    was computed from old parameters, is dropped; then the worker takes part again. Workers that have no sample left in
    an epoch's last step take part with weight 0. `clip_norm` clips the mean gradient, by the norm of the whole gradient
    on several servers too. The servers update with the learning rates and all other numbers of the workers'
    param_groups, which must be the same on all workers.

    Bytes per worker and step: one gradient vector put by the worker, one parameter vector put by the servers. With
    `servers = "colocated"`, p ranks and shards of equal bytes each rank moves 2n(p − 1)/p, as a ring all-reduce does.

    Reference: Suyog Gupta, Wei Zhang, Fei Wang, "Model accuracy and runtime tradeoff in distributed deep learning: a
    systematic study", 2016, section 3.
    """

    class Config(ServerStrategy.Config):
        """Options of hardsync."""

        fan_in: FanIn = None

    contract = replace(ServerStrategy.contract, averages="gradients", synchronizes="every step")

    def __init__(self, config: Config, comm, model, **kwargs):
        super().__init__(config, comm, model, **kwargs)
        exchange_gradients(self, HardsyncPolicy())
