"""Check what a loop over a sharded loader does to its models in an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hpcdist.session import rules
from hpcdist.session.loader.period import WeightedBatch
from hpcdist.session.world import current
from hpcdist.strategies import Strategy


class Epoch:
    """Sees what a loop does in an epoch with the models of these strategies, and refuses what no strategy would see."""

    def __init__(self, strategies: Sequence[Strategy]):
        self._strategies, self._ran = strategies, False
        self._before = [strategy.steps for strategy in strategies]
        own = _distributed()
        named = {id(p): (name, p) for s in strategies for name, p in s.model.module.named_parameters()}
        others = [pair for key, pair in named.items() if key not in own and pair[1].requires_grad]
        self._others = [(name, p, p.detach().sum().item()) for name, p in others if current().comm.size > 1]

    def _trains(self) -> bool:
        """Tell whether a model has had a step, or a backward pass that a step may follow."""
        pairs = zip(self._strategies, self._before, strict=True)
        return any(strategy.steps > before or strategy.model.gradients.weights for strategy, before in pairs)

    def watch(self, batches: Iterator[WeightedBatch]) -> Iterator[WeightedBatch]:
        """Pass the batches on. If the first trains nothing, note whether a model runs on the others.

        In an epoch that trains no hook is set, for which torch.compile would compile anew.
        """
        hooks = []
        try:
            for number, batch in enumerate(batches):
                if number == 1 and not self._trains():
                    modules = [strategy.model.module for strategy in self._strategies]
                    plain = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
                    hooks = [module.register_forward_pre_hook(self._note) for module in plain]
                yield batch
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, module: nn.Module, inputs: Any) -> None:
        self._ran = True

    def check(self) -> None:
        """Raise ConfigError at the end of an epoch that should have gone another way.

        It has changed a model along its gradients without a step of the strategy (gradients that are averaged as they
        arrive allow that); evaluated models, each rank on its share of the training samples; or trained parameters that
        no DistributedOptimizer has, along this rank's gradients.
        """
        for strategy, steps in zip(self._strategies, self._before, strict=True):
            passes_by = strategy.steps == steps and strategy.model.gradients.weights
            if passes_by and rules.forbids("an epoch trains without step()", strategy):
                strategy.model.refresh()
                if strategy.model.touched():
                    raise rules.error("an epoch trains without step()", strategy)
        evaluates = self._ran or not any(strategy.model.module.training for strategy in self._strategies)
        if evaluates and not self._trains():
            rules.refuse("a training loader is iterated for an evaluation", self._strategies[0])
        own = _distributed() if self._others else ()  # a layer may have been unfrozen meanwhile
        for name, parameter, before in self._others:
            if id(parameter) not in own and parameter.grad is not None and parameter.detach().sum().item() != before:
                raise rules.error("a plain optimiser trains the rest of the model", name=name)


def _distributed() -> set[int]:
    """Return the ids of the parameters that DistributedOptimizers train."""
    return {id(slot.tensor) for optimizer in current().optimizers for slot in optimizer.strategy.model.slots}
