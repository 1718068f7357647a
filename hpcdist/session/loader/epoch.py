"""Check what a loop over a sharded loader has done to its models in an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hpcdist.session import rules
from hpcdist.session.loader.period import Weighed
from hpcdist.session.world import current
from hpcdist.strategies import Strategy


class Epoch:
    """What an epoch does with the models of these strategies."""

    def __init__(self, strategies: Sequence[Strategy]):
        self._strategies, self._ran = strategies, False
        self._before = [strategy.steps for strategy in strategies]

    def _trains(self) -> list[bool]:
        """Tell for each model whether it has had a step, or a backward pass that a step may follow."""
        pairs = zip(self._strategies, self._before, strict=True)
        return [strategy.steps > before or bool(strategy.model.passes) for strategy, before in pairs]

    def watch(self, batches: Iterator[Weighed]) -> Iterator[Weighed]:
        """Pass the batches on. If the first trains nothing, note whether a model runs on the others.

        In an epoch that trains no hook is set, for which torch.compile would compile anew.
        """
        hooks = []
        try:
            for number, batch in enumerate(batches):
                if number == 1 and not any(self._trains()):
                    modules = [strategy.model.module for strategy in self._strategies]
                    plain = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
                    hooks = [module.register_forward_pre_hook(self._note) for module in plain]
                yield batch
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, module: nn.Module, inputs: Any) -> None:
        self._ran = True

    def require_steps(self) -> None:
        """Raise ConfigError where the epoch has changed a model, along its gradients, past the strategy.

        Where gradients are averaged as they arrive that is all the same.
        """
        for strategy, before in zip(self._strategies, self._before, strict=True):
            allowed = not rules.forbids("an epoch trains without step()", strategy)
            if allowed or strategy.steps > before or not strategy.model.passes:
                continue
            strategy.model.refresh()
            if strategy.model.touched():
                raise rules.error("an epoch trains without step()", strategy)

    def require_no_evaluation(self) -> None:
        """Raise ConfigError where the epoch has evaluated models, each rank on its share of the training samples."""
        evaluates = self._ran or not any(strategy.model.module.training for strategy in self._strategies)
        if evaluates and not any(self._trains()):
            rules.refuse("a training loader is iterated for an evaluation", self._strategies[0])


def _distributed() -> set[int]:
    """Return the ids of the parameters that DistributedOptimizers train."""
    return {id(p) for optimizer in current().optimizers for p in optimizer.strategy.model.parameters()}


class Others:
    """Trainable parameters of the models in a loop that no DistributedOptimizer has."""

    def __init__(self, strategies: Sequence[Strategy]):
        own = _distributed()
        named = {id(p): (name, p) for s in strategies for name, p in s.model.module.named_parameters()}
        left = [pair for key, pair in named.items() if key not in own and pair[1].requires_grad]
        self._sums = [(name, p, p.detach().sum().item()) for name, p in left if current().comm.size > 1]

    def require_unchanged(self) -> None:
        """Raise ConfigError where one of them has been trained: along this rank's gradients alone."""
        own = _distributed() if self._sums else ()  # a layer may have been unfrozen meanwhile
        for name, parameter, before in self._sums:
            if id(parameter) not in own and parameter.grad is not None and parameter.detach().sum().item() != before:
                raise rules.error("a plain optimiser trains the rest of the model", name=name)
