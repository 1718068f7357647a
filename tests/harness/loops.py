"""The training loop of tests: plain, or by a strategy without a session; what differs between tests is hooked in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def steps(
    optimizer: Any,
    batches: Iterable[Any],
    backward: Callable[[Any], Any],
    *,
    step: Callable[[], Any] | None = None,
    after: Callable[[Any], Any] | None = None,
) -> None:
    """Take a step for each batch.

    Args:
        optimizer: zeroes the gradients.
        backward: (batch) -> anything. Adds up the gradients; may change them, too.
        step: takes the step; `optimizer.step`, if None.
        after: (batch) -> anything. Called after each step.
    """
    for batch in batches:
        optimizer.zero_grad()
        backward(batch)
        (step or optimizer.step)()
        if after is not None:
            after(batch)


def by_strategy(
    strategy: Any,
    local: torch.optim.Optimizer,
    batches: Iterable[Any],
    backward: Callable[[Any], Any],
    *,
    update: Callable[[], Any] | None = None,
    take: Callable[[], Any] | None = None,
    after: Callable[[Any], Any] | None = None,
    pauses: bool = True,
) -> list[Any]:
    """Collective with servers. Take a strategy's steps on a worker, and return their records; serve on a server.

    Args:
        update: the local update; `local.step`, if None.
        take: takes the strategy's step; `strategy.step(update)`, if None.
        pauses: pause after the last step, for which servers wait.
    """
    update, records = update or local.step, []
    if not strategy.is_worker:
        strategy.serve(update)
        return records

    def compute(batch: Any) -> None:
        strategy.comm.compute()
        backward(batch)

    take = take or (lambda: strategy.step(update))
    steps(local, batches, compute, step=lambda: records.append(take()), after=after)
    if pauses:
        strategy.pause()
    return records


def vector(module: nn.Module) -> Tensor:
    """The parameters as one flat tensor, a copy."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])
