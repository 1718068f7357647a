"""The user's DataLoader, each sample on one worker only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler

from hpcdist.data.sharding import EpochPlan
from hpcdist.errors import ConfigError
from hpcdist.session.world import broadcast, current

_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers"),
)


def shard(loader: DataLoader, *, seed: int = 0, training: bool = True) -> ShardedLoader:
    """This rank's share of `loader`: every sample exactly once per epoch, on whatever number of ranks.

    `loader.batch_size` becomes the batch of each worker. A shuffling loader is shuffled by (seed, epoch), the same on
    all ranks; any other sampler is asked on rank 0, whose order all ranks follow. In the last step, which may have
    fewer samples, gradients are weighted by sample counts; where a worker has no sample in a step that needs all, it
    takes part with weight 0. On a rank that only serves, iterating yields nothing and serves until the workers end
    the epoch.

    Args:
        training: False shares the samples of an evaluation among all ranks, and involves no optimiser.

    Raises:
        ConfigError: the loader has no batch size or no length.
    """
    return ShardedLoader(loader, seed, training)


class ShardedLoader:
    """What `shard` returns; each iteration is one epoch. `set_epoch` goes to another one."""

    def __init__(self, loader: DataLoader, seed: int, training: bool):
        if loader.batch_size is None:
            raise ConfigError(
                "loader must have a batch_size and no batch_sampler of its own; got none. Pass batch_size, and a "
                "sampler where the order matters."
            )
        if not hasattr(loader.dataset, "__len__"):
            raise ConfigError(
                f"loader's data set must have a length; got {type(loader.dataset).__name__}. Shard an iterable data "
                "set where it reads its sources."
            )
        self._loader, self._seed, self._training = loader, seed, training
        self._epoch = -1
        self._batches = _Batches()
        kept: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT}
        self._sharded = DataLoader(loader.dataset, batch_sampler=self._batches, **kept)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is epoch `epoch`."""
        self._epoch = epoch - 1

    def __len__(self) -> int:
        """Batches of this rank in an epoch (0 on a rank that only serves)."""
        workers = self._workers()
        if current().comm.rank not in workers:
            return 0
        worker, plan = workers.index(current().comm.rank), self._plan(workers, max(self._epoch, 0))
        return sum(plan.sizes(step)[worker] > 0 for step in range(self._steps(plan)))

    def __iter__(self) -> Iterator[Any]:
        self._epoch += 1
        rank, workers = current().comm.rank, self._workers()
        plan = self._plan(workers, self._epoch)
        self._batches.order = self._order()
        if rank not in workers:
            optimizer = current().optimizer
            optimizer.strategy.serve(optimizer.update)
            return
        self._batches.plan, self._batches.worker = plan, workers.index(rank)
        self._batches.steps = self._steps(plan)
        yield from self._train() if self._training else self._sharded

    def _train(self) -> Iterator[Any]:
        optimizer, batches = current().optimizer, self._batches
        strategy = optimizer.strategy
        try:
            drawn = iter(self._sharded)
            for step in range(batches.steps):
                sizes = batches.plan.sizes(step)
                strategy.model.weight = sizes[batches.worker] * len(sizes) / sum(sizes)
                if sizes[batches.worker]:
                    yield next(drawn)
                else:
                    optimizer.join()
        finally:
            strategy.model.weight = 1.0
            strategy.pause()

    def _workers(self) -> tuple[int, ...]:
        session = current()
        if not self._training:
            return tuple(range(session.comm.size))
        if session.optimizer is None:
            raise ConfigError(
                "a sharded loader must be iterated after hpcdist.DistributedOptimizer, which says which ranks train; "
                "got none. For an evaluation pass training=False."
            )
        strategy = session.optimizer.strategy
        return strategy.worker_ranks(strategy.config, session.comm.size)

    def _plan(self, workers: tuple[int, ...], epoch: int) -> EpochPlan:
        shuffled = type(self._loader.sampler) is RandomSampler
        return EpochPlan(
            len(self._loader.sampler), len(workers), self._loader.batch_size, seed=self._seed, epoch=epoch,
            shuffle=shuffled,
        )  # fmt: skip

    def _steps(self, plan: EpochPlan) -> int:
        return plan.n_samples // plan.global_batch if self._loader.drop_last else plan.steps

    def _order(self) -> np.ndarray | None:
        """Collective for samplers other than torch's own two: rank 0's draw."""
        sampler = self._loader.sampler
        if type(sampler) in (RandomSampler, SequentialSampler):
            return None
        order = torch.tensor(list(sampler), dtype=torch.int64)
        return broadcast(order).numpy()


class _Batches(Sampler):
    """The index lists of one worker in the current epoch; the DataLoader keeps the object, its contents change."""

    plan: EpochPlan
    worker = steps = 0
    order: np.ndarray | None = None  # a position in the plan stands for this sample

    def __init__(self):
        pass  # torch's own would warn

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.steps):
            indices = self.plan.indices(step, self.worker)
            if indices.size:
                yield (indices if self.order is None else self.order[indices]).tolist()

    def __len__(self) -> int:
        return self.steps
