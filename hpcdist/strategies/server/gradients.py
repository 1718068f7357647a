"""Exchange gradients for parameters: a worker that pushes them, and servers that update by a policy."""

from __future__ import annotations

from hpcdist.strategies.server.gradient_server import GradientServer
from hpcdist.strategies.server.policy import Policy
from hpcdist.strategies.server.strategy import ServerStrategy
from hpcdist.strategies.server.worker import GradientWorker


def exchange_gradients(strategy: ServerStrategy, policy: Policy, *, overlap: bool = False) -> None:
    """Compose a strategy whose servers update by this policy; see `GradientWorker` for `overlap`."""
    strategy.compose(lambda: GradientWorker(strategy, overlap=overlap), lambda: GradientServer(strategy, policy))
