"""A torch optimiser whose steps are a strategy's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hpcdist import strategies
from hpcdist.errors import ConfigError
from hpcdist.flat import FlatModel
from hpcdist.records import StepRecord
from hpcdist.session.world import current, require_equal
from hpcdist.strategies import Strategy


class _Distributed:
    """What `DistributedOptimizer` adds to an optimiser's class."""

    strategy: Strategy
    record: StepRecord | None  # of the last step

    def step(self, closure=None):
        """Takes one step by the strategy. Collective for synchronous strategies."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.record = self.strategy.step(self.update)
        return loss

    step._wrapped_by_lr_sched = True  # torch's schedules warn where a step doesn't look like one that they count...

    def join(self) -> None:
        """Takes part in a step for which this rank has no samples."""
        self.strategy.join(self.update)

    def update(self) -> None:
        """The local optimiser's own step on the gradients in the model."""
        if self.clip_norm is not None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        self.local_step()


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    strategy: str = "allreduce",
    *,
    clip_norm: float | None = None,
    bucket_bytes: int = 25 << 20,
    **options: Any,
) -> torch.optim.Optimizer:
    """Collective. Makes `optimizer` train `model` together with the other ranks; changes it in place and returns it.

    The model must be on its device; its parameters move into flat memory, and rank 0's values go to all.
    Learning-rate schedules and `state_dict` work as before.

    Args:
        strategy: a name of `hpcdist.strategies.available()`.
        clip_norm: largest 2-norm of all gradients together, applied where the update is made.
        bucket_bytes: gradients are reduced in buckets of about this size.
        options: the strategy's own, see its Config or `hpcdist strategies`.

    Raises:
        ConfigError: an option is unknown or out of range, or the optimiser evaluates several times per step.
        MismatchError: ranks differ in strategy, options, optimiser or model.
    """
    session = current()
    _check_optimizer(optimizer, clip_norm)
    cls = strategies.load(strategy)
    config = cls.Config.from_mapping(options, "strategy")
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    mine = {"strategy": strategy, "options": config.model_dump(), "optimizer": type(optimizer).__name__}
    require_equal(session.comm, mine | {"groups": groups, "clip_norm": clip_norm}, "strategy and optimiser")
    flat = FlatModel(model, bucket_bytes=bucket_bytes)
    local_class = type(optimizer)
    optimizer.local_step = local_class.step.__get__(optimizer)
    vars(optimizer).pop("step", None)  # a learning-rate schedule puts its own there, which would pass by ours
    optimizer.__class__ = type(local_class.__name__, (_Distributed, local_class), {})
    optimizer.clip_norm, optimizer.record = clip_norm, None
    optimizer._opt_called = True  # ... and where they find none before their own; a server's worker never makes one
    optimizer.strategy = cls(config, session.comm.split(0), flat)
    session.optimizer = optimizer
    return optimizer


def _check_optimizer(optimizer: torch.optim.Optimizer, clip_norm: float | None) -> None:
    if isinstance(optimizer, _Distributed):
        raise ConfigError("optimizer must be a plain torch optimiser; got one that is distributed already.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "optimizer must evaluate the loss once per step; got LBFGS, whose line search evaluates it again on one "
            "rank's samples alone. Use another optimiser."
        )
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(f"clip_norm must be greater than 0, or None; got {clip_norm}.")
