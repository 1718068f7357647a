"""The asynchronous parameter server: apply gradients in order of arrival, without a limit on staleness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from hpcdist.strategies.server.channel import ServerRequest
from hpcdist.strategies.server.gradients import GradientStrategy
from hpcdist.strategies.server.stale import StaleConfig, StalePolicy


class AsynchronousPolicy(StalePolicy):
    """Update with each gradient as it arrives; no worker waits for others."""

    def complete(self, gradients: Sequence[ServerRequest], summed: int, active: Sequence[int]) -> bool:
        return any(not gradient.added for gradient in gradients)


@final
class ParameterServer(GradientStrategy):
    """Apply each worker's gradient as it arrives: asynchronous SGD with servers; all other ranks are workers.

    Every step of a worker: put the gradient, with the clock of the parameters it was computed from, into the worker's
    slot on the server, and wait for the reply. The server applies gradients one by one in order of arrival with its
    optimiser (any of torch's), adds 1 to its clock, and replies by putting the new parameters and clock into the
    worker's memory. A gradient's staleness is the server's clock at application minus the gradient's clock; its mean is
    λ − 1 for λ workers. On one rank the optimiser runs locally.

    With several servers each has a shard of the parameters and a separate clock. With `overlap`, as in Rudra-adv*, the
    worker computes its next gradient while the last one is being sent; the mean staleness is then 2λ − 1.

    Bytes per worker and step: one gradient vector put by the worker, one parameter vector put by the servers.

    Example on 3 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "parameter_server", max_staleness=4)

    Reference: Suyog Gupta, Wei Zhang, Fei Wang, "Model accuracy and runtime tradeoff in distributed deep learning: a
    systematic study", 2016 (n-softsync with n = λ); Jeffrey Dean et al., "Large scale distributed deep networks",
    2012 (Downpour SGD with n_fetch = n_push = 1).
    """

    Config = StaleConfig
    config: StaleConfig

    def policy(self) -> AsynchronousPolicy:
        return AsynchronousPolicy(self.config, len(self.roles.workers))
