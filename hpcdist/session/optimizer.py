"""A torch optimiser whose steps are a strategy's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hpcdist import strategies
from hpcdist.errors import ConfigError
from hpcdist.flat import FlatModel
from hpcdist.records import StepRecord
from hpcdist.session.world import current, require_equal
from hpcdist.strategies import Strategy
from hpcdist.strategies.allreduce import AllReduce


def _as_it_is(step: Callable) -> Callable:
    """Keeps torch from wrapping a `step` whose local step it has wrapped already: hooks would run twice."""
    step.hooked = True
    step._wrapped_by_lr_sched = True  # schedules warn where a step doesn't look like one that they count...
    return step


class _Distributed:
    """What `DistributedOptimizer` adds to an optimiser's class."""

    strategy: Strategy
    record: StepRecord | None  # of the last step

    @_as_it_is
    def step(self, closure=None):
        """Takes one step by the strategy. Collective for synchronous strategies."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.record = self.strategy.step(self.update)
        return loss

    def join(self) -> None:
        """Takes part in a step for which this rank has no samples."""
        self.record = self.strategy.join(self.update)

    def update(self) -> None:
        """The local optimiser's own step on the gradients in the model."""
        if self.clip_norm is not None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        self.local_step()


class _Evaluating(_Distributed):
    """The same for an optimiser whose step evaluates its closure as often as it likes, such as L-BFGS."""

    strategy: AllReduce

    @_as_it_is
    def step(self, closure=None):
        """Collective. Takes one step on the batches of all ranks together; returns what the optimiser's own does.

        L-BFGS returns the loss at the step's start: the mean over the ranks.
        """
        if closure is None:
            raise ConfigError(
                f"closure must be given to each step of {type(self).__name__}, which evaluates the loss several times; "
                "got none. Pass a function that zeroes the gradients, runs the backward pass and returns the loss."
            )
        self.record, loss = self.strategy.minimise(self.local_step, closure)
        return loss

    def join(self) -> None:
        self.record, _ = self.strategy.minimise(self.local_step, None)


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
    Learning-rate schedules and `state_dict` work as before. An optimiser whose step must be given a closure, such as
    LBFGS, evaluates it as often as it likes: each time, gradients and loss are averaged over the ranks.

    Args:
        strategy: a name of `hpcdist.strategies.available()`.
        clip_norm: largest 2-norm of all gradients together, applied where the update is made; on one of several servers
            that of its shard's gradients.
        bucket_bytes: gradients are reduced in buckets of about this size.
        options: the strategy's own, see its Config or `hpcdist strategies`.

    Raises:
        ConfigError: an option is unknown or out of range, or does not suit an optimiser that must be given a closure:
            its strategy must be allreduce, without clipping and without leaving out steps.
        MismatchError: ranks differ in strategy, options, optimiser or model.
    """
    session = current()
    _check_optimizer(optimizer, clip_norm)
    cls = strategies.load(strategy)
    config = cls.Config.from_mapping(options, "strategy")
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    mine = {"strategy": strategy, "options": config.model_dump(), "optimizer": type(optimizer).__name__}
    require_equal(session.comm, mine | {"groups": groups, "clip_norm": clip_norm}, "strategy and optimiser")
    evaluating = _must_have_closure(optimizer)
    if evaluating:
        _check_evaluating(type(optimizer).__name__, strategy, config, clip_norm)
    flat = FlatModel(model, bucket_bytes=bucket_bytes)
    local_class = type(optimizer)
    optimizer.local_step = local_class.step.__get__(optimizer)
    vars(optimizer).pop("step", None)  # a learning-rate schedule puts its own there, which would pass by ours
    added = _Evaluating if evaluating else _Distributed
    optimizer.__class__ = type(local_class.__name__, (added, local_class), {})
    optimizer.clip_norm, optimizer.record = clip_norm, None
    optimizer._opt_called = True  # ... and where they find none before their own; a server's worker never makes one
    optimizer.strategy = cls(config, session.comm.split(0), flat)
    optimizer.strategy.optimizer = optimizer
    session.optimizer = optimizer
    return optimizer


def _check_optimizer(optimizer: torch.optim.Optimizer, clip_norm: float | None) -> None:
    if isinstance(optimizer, _Distributed):
        raise ConfigError("optimizer must be a plain torch optimiser; got one that is distributed already.")
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(f"clip_norm must be greater than 0, or None; got {clip_norm}.")


def _must_have_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step can't do without a closure: then it may evaluate that several times."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _check_evaluating(name: str, strategy: str, config: Strategy.Config, clip_norm: float | None) -> None:
    if strategy != "allreduce":
        raise ConfigError(
            f"strategy must be allreduce with {name}, whose steps evaluate the loss several times, on all ranks' "
            f"samples together; got {strategy}. Use allreduce, or another optimiser."
        )
    if config.compression:
        raise ConfigError(
            f"strategy.compression must be none with {name}, whose line search and curvature need the loss's own "
            f"gradient; got {config.compression.name}. Leave it out."
        )
    if not config.provider.exact:
        raise ConfigError(
            f"strategy.provider must give the mean of gradients with {name}, whose line search and curvature need the "
            f"loss's own gradient; got op {config.provider.op!r}, compression {config.provider.compression!r}. Leave "
            "them out."
        )
    if clip_norm is not None:
        raise ConfigError(
            f"clip_norm must be None with {name}, whose line search and curvature need the loss's own gradient; "
            f"got {clip_norm}. Leave it out."
        )
    if config.on_nonfinite == "skip":
        raise ConfigError(
            f"strategy.on_nonfinite must be stop or ignore with {name}, whose step can't be left out half made; got "
            "skip, which amp = 'fp16' sets too. Use stop; amp = 'bf16' does with that."
        )
