"""Check how a loop over a sharded loader changes its models in an epoch."""

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
    """Watches a loop's changes of these strategies' models in an epoch, to refuse training outside of the strategy."""

    def __init__(self, strategies: Sequence[Strategy]):
        self._strategies, self._ran = strategies, False
        self._before = [strategy.steps for strategy in strategies]
        trained = _distributed_parameters()
        named = {id(p): (name, p) for s in strategies for name, p in s.model.module.named_parameters()}
        untrained = [pair for key, pair in named.items() if key not in trained and pair[1].requires_grad]
        # Name, parameter and its sum, of parameters that no DistributedOptimizer trains.
        self._others = [(name, p, p.detach().sum().item()) for name, p in untrained if current().comm.size > 1]

    def _trains(self) -> bool:
        """Return whether a model has taken a step, or has run a backward pass for one."""
        pairs = zip(self._strategies, self._before, strict=True)
        return any(strategy.steps > before or strategy.model.gradients.weights for strategy, before in pairs)

    def watch(self, batches: Iterator[WeightedBatch]) -> Iterator[WeightedBatch]:
        """Pass the batches on. If the first batch trains nothing, record whether a model runs on later ones.

        An epoch that trains gets no hook, because torch.compile would recompile the model for it.
        """
        hooks = []
        try:
            for number, batch in enumerate(batches):
                if number == 1 and not self._trains():
                    modules = [strategy.model.module for strategy in self._strategies]
                    plain = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
                    hooks = [module.register_forward_pre_hook(self._record_run) for module in plain]
                yield batch
        finally:
            for hook in hooks:
                hook.remove()

    def _record_run(self, module: nn.Module, inputs: Any) -> None:
        self._ran = True

    def check(self) -> None:
        """Raise ConfigError at the end of an epoch with one of these mistakes.

        - A model changed along its gradients without a step of the strategy.
        - The epoch only evaluated models, each rank on its share of the training samples.
        - Parameters without a DistributedOptimizer were trained along this rank's gradients.
        """
        for strategy, steps_before in zip(self._strategies, self._before, strict=True):
            bypassed = strategy.steps == steps_before and strategy.model.gradients.weights
            if bypassed and rules.forbids("an epoch trains without step()", strategy):
                strategy.model.refresh()
                if strategy.model.touched():
                    raise rules.error("an epoch trains without step()", strategy)
        evaluates = self._ran or not any(strategy.model.module.training for strategy in self._strategies)
        if evaluates and not self._trains():
            rules.refuse("a training loader is iterated for an evaluation", self._strategies[0])
        trained = _distributed_parameters() if self._others else ()  # again, because layers may have been unfrozen
        for name, p, sum_before in self._others:
            if id(p) not in trained and p.grad is not None and p.detach().sum().item() != sum_before:
                raise rules.error("a plain optimiser trains the rest of the model", name=name)


def _distributed_parameters() -> set[int]:
    """Return the ids of the parameters that DistributedOptimizers train."""
    return {id(slot.tensor) for optimizer in current().optimizers for slot in optimizer.strategy.model.slots}
