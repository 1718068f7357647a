"""Run a period of training: workers step on their batches, servers process their messages; check an epoch's changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hpcdist.comm.communicator import Communicator
from hpcdist.data.sharding import EpochPlan
from hpcdist.session import rules
from hpcdist.session.world import current
from hpcdist.strategies import Strategy
from hpcdist.strategies.lbfgs.portions import JointBatch
from hpcdist.strategies.server.strategy import serve_jointly


class WeightedBatch(NamedTuple):
    """A batch of this rank for one step, and its weight.

    `weight` is this rank's number of samples in the step divided by the workers' mean number; 0 for a padding batch.
    `ends_epoch` marks the epoch's last batch. `counts` returns the number of samples of each worker's batch, if known.
    """

    batch: Any
    weight: float = 1.0
    ends_epoch: bool = False
    counts: Callable[[], Sequence[float]] | None = None


def gather_counts(group: Communicator, *numbers: float) -> Tensor:
    """Collective. Return the `numbers` of all ranks, such as sample counts: shape (numbers, ranks), float64."""
    counts = torch.zeros(len(numbers), group.size, dtype=torch.float64)  # a sum of zeros and one number is exact
    counts[:, group.rank] = torch.tensor(numbers, dtype=torch.float64)
    group.allreduce(counts.view(-1))
    return counts


def relative_weight(counts: Tensor, rank: int) -> float:
    """Return a rank's count divided by the mean count: the weight of its batch. 1 if all counts are 0."""
    return float(counts[rank] * len(counts) / counts.sum()) if counts.any() else 1.0


def period(
    optimizers: Sequence[Any], batches: Iterable[WeightedBatch], *, pauses_when_left: bool = False
) -> Iterator[Any]:
    """Yield a worker's batches, set their weights, pause the strategy after the last; a server serves until then.

    Args:
        optimizers: the distributed optimisers of the loop, with the same workers.
        pauses_when_left: pause also if the loop ends by `break` or an error, so that other ranks don't wait.
    """
    strategies = [optimizer.strategy for optimizer in optimizers]
    for strategy in strategies if len(strategies) > 1 else ():
        rules.refuse("several optimisers share a loop", strategy, count=len(strategies))
    if not strategies[0].is_worker:
        serve_jointly([(optimizer.strategy, optimizer.attachment.local_step) for optimizer in optimizers])
        for strategy in strategies:
            strategy.records.keep()
        return
    pauses, uneven = pauses_when_left, False
    for optimizer in optimizers:
        optimizer.strategy.model.refresh()
        optimizer.attachment.take_snapshot()
        optimizer.attachment.uneven = False
    try:
        for batch, weight, ends_epoch, _ in batches:
            uneven |= weight != 1.0
            for strategy in strategies:
                strategy.model.gradients.start_batch(weight, ends_epoch=ends_epoch)
            with strategies[0].comm.trace.span(f"step {strategies[0].steps + 1}", "step"):
                yield batch
        pauses = True
    finally:
        for optimizer, strategy in zip(optimizers, strategies, strict=True):
            strategy.model.gradients.start_batch(None)
            optimizer.attachment.uneven = uneven and strategy.contract.weights_batches
            optimizer.attachment.pending = bool(strategy.model.gradients.weights)
        for optimizer in optimizers if pauses else ():
            optimizer.strategy.pause()
            optimizer.strategy.records.keep()
            optimizer.attachment.snapshot = None  # until the next epoch the loop may change parameters


def joint_batch(plan: EpochPlan, step: int, worker: int, config: Any) -> tuple[np.ndarray, JointBatch]:
    """Return the indices of all workers' samples in a step, and one worker's description of the joint batch.

    Args:
        config: of the strategy; `config.overlap` is the share of a batch that the next batch repeats.
    """
    indices, head, tail = plan.joint(step, config.overlap)
    share = plan.sizes(step)[worker]
    return indices, JointBatch(len(indices), share, head, tail, whole=len(indices) == plan.n_samples)


# --- changes of models in an epoch ------------------------------------------------------------------------------------
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
                if number == 1 and current().comm.size > 1 and not self._trains():  # one rank may do anything
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
