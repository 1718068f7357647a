"""Wait for one gradient of every worker, then update and reply to all workers: hardsync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from hpcdist.strategies.server.channel import ServerRequest
from hpcdist.strategies.server.gradients import GradientStrategy, Policy
from hpcdist.strategies.server.placement import FanIn


class HardsyncPolicy(Policy):
    """Update with one gradient of every active worker; drop gradients that were computed from older parameters."""

    def complete(self, gradients: Sequence[ServerRequest], summed: int, active: Sequence[int]) -> bool:
        return bool(gradients) and {gradient.source for gradient in gradients} >= set(active)

    def may_go(self, gradient: ServerRequest, active: Sequence[int]) -> bool:
        return gradient.applied

    def arrived(self, source: int, staleness: int) -> str | None:
        return f"dropped: a gradient of rank {source} missed {staleness} updates" if staleness else None


@final
class Hardsync(GradientStrategy):
    """Update with the mean of one gradient of each worker: synchronous SGD through servers.

    Equals `allreduce`, and one process with the joint batch of all workers; the sum is taken in rank order. No gradient
    is stale. The servers do not wait for an evicted worker (`learner_deadline_s`) or a failed one: updates use the
    remaining workers' gradients, weighted by their samples. The next gradient of an evicted worker is stale and is
    dropped; then the worker takes part again. Workers without samples in an epoch's last step take part with weight 0.
    `clip_norm` clips the whole mean gradient, also on several servers. The servers use the learning rates and all other
    hyper-parameters of the workers' param_groups, which must be equal on all workers.

    Bytes per worker and step: one gradient vector put by the worker, one parameter vector put by the servers. With
    `servers = "colocated"`, p ranks and shards of equal bytes each rank moves 2n(p − 1)/p, as a ring all-reduce does.

    Example on 3 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "hardsync", servers=1)

    Reference: Suyog Gupta, Wei Zhang, Fei Wang, "Model accuracy and runtime tradeoff in distributed deep learning: a
    systematic study", 2016, section 3.
    """

    class Config(GradientStrategy.Config):
        fan_in: FanIn = None

    contract = replace(GradientStrategy.contract, averages="gradients", synchronizes="every step")

    def policy(self) -> HardsyncPolicy:
        return HardsyncPolicy()
