"""Run one period of training: workers step on their batches until they pause, servers process their messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.data.sharding import EpochPlan
from hpcdist.session import rules
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
    """Yield a worker's batches, set the weight of each, and pause the strategy after the last; on a server, serve.

    A server yields nothing: it serves until all workers have paused.

    Args:
        optimizers: the distributed optimisers of the loop, with the same workers.
        pauses_when_left: pause also if the loop ends by `break` or an error, so that other ranks don't wait.
    """
    strategies = [optimizer.strategy for optimizer in optimizers]
    for strategy in strategies if len(strategies) > 1 else ():
        rules.refuse("several optimisers share a loop", strategy, count=len(strategies))
    if not strategies[0].is_worker:
        serve_jointly([(optimizer.strategy, optimizer.attachment.local_step) for optimizer in optimizers])
        return
    pauses = pauses_when_left
    for optimizer in optimizers:
        optimizer.strategy.model.refresh()
        optimizer.attachment.take_snapshot()
    try:
        for batch, weight, ends_epoch, _ in batches:
            for strategy in strategies:
                strategy.model.gradients.start_batch(weight, ends_epoch=ends_epoch)
            with strategies[0].comm.trace.span(f"step {strategies[0].steps + 1}", "step"):
                yield batch
        pauses = True
    finally:
        for strategy in strategies:
            strategy.model.gradients.end_batches()
        for optimizer in optimizers if pauses else ():
            optimizer.strategy.pause()
            optimizer.attachment.snapshot = None  # until the next epoch the loop may change parameters


def joint_batch(plan: EpochPlan, step: int, worker: int, config: Any) -> tuple[np.ndarray, JointBatch]:
    """Return the indices of all workers' samples in a step, and one worker's description of the joint batch.

    Args:
        config: of the strategy; `config.overlap` is the share of a batch that the next batch repeats.
    """
    indices, head, tail = plan.joint(step, config.overlap)
    share = plan.sizes(step)[worker]
    return indices, JointBatch(len(indices), share, head, tail, whole=len(indices) == plan.n_samples)
