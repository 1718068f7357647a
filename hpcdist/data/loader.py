"""One worker's batches of an epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Protocol

import numpy as np
from torch import Tensor
from torch.utils.data import Sampler

from hpcdist.data.sharding import EpochPlan
from hpcdist.errors import ConfigError

Batch = tuple[Tensor, Tensor]


class BatchSource(Protocol):
    """A data set for Loader: `HDF5Dataset`, or any other with a length and a method `batch`."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> Batch: ...


class Loader:
    """The (x, y) batches of one worker, in the current epoch's order.

    If the last step has no sample for this worker, it yields nothing for that step; `plan.sizes(step)` has the batch
    sizes of all. With `fill` it yields a batch of weight 0 then (`EpochPlan.batch`, `EpochPlan.weight`).

    Args:
        dataset: The data set.
        batch_size: Samples per worker and step.
        worker, workers: This worker's number, and the number of workers.
        seed, shuffle: As in EpochPlan.
        fill: Yield a batch in every step.
        transform: A function (x, y) -> (x, y), applied to each batch.
        prefetch: Batches that a background thread reads ahead; 0 reads in the caller's thread. The thread ends with
            its iteration.
    """

    def __init__(
        self,
        dataset: BatchSource,
        batch_size: int,
        *,
        worker: int = 0,
        workers: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        fill: bool = False,
        transform: Callable[[Tensor, Tensor], Batch] | None = None,
        prefetch: int = 0,
    ):
        if prefetch < 0:
            raise ConfigError(f"prefetch must be at least 0; got {prefetch}.")
        self.dataset, self.transform, self.prefetch = dataset, transform, prefetch
        self._sampler = ShardedBatchSampler(
            EpochPlan(len(dataset), workers, batch_size, seed=seed, shuffle=shuffle), worker, fill=fill
        )

    @property
    def plan(self) -> EpochPlan:
        """The current epoch's plan."""
        return self._sampler.plan

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Go to `epoch`, after its first `start` samples (`plan.position` of the interrupted run)."""
        self._sampler.set_epoch(epoch, start)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        batches = self._sampler.batches()
        return map(self._fetch, batches) if not self.prefetch else self._ahead(batches)

    def _fetch(self, indices: np.ndarray) -> Batch:
        batch = self.dataset.batch(indices)
        return batch if self.transform is None else self.transform(*batch)

    def _ahead(self, batches: Iterator[np.ndarray]) -> Iterator[Batch]:
        thread = ThreadPoolExecutor(1, thread_name_prefix="hpcdist-prefetch")
        try:
            pending = deque(thread.submit(self._fetch, indices) for indices in islice(batches, self.prefetch))
            while pending:
                batch = pending.popleft().result()
                pending.extend(thread.submit(self._fetch, indices) for indices in islice(batches, 1))
                yield batch
        finally:
            thread.shutdown(wait=True, cancel_futures=True)


class ShardedBatchSampler(Sampler):
    """One worker's batches of sample indices, for torch's `DataLoader(dataset, batch_sampler=...)`; see Loader."""

    def __init__(self, plan: EpochPlan, worker: int = 0, *, fill: bool = False):
        if not 0 <= worker < plan.workers:
            raise ConfigError(f"worker must be in 0..{plan.workers - 1}; got {worker}.")
        self.plan, self.worker, self.fill = plan, worker, fill

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Go to `epoch`, after its first `start` samples."""
        self.plan = self.plan.at(epoch, start)

    def batches(self) -> Iterator[np.ndarray]:
        """Iterate the batches as int64 arrays."""
        plan = self.plan  # set_epoch has no effect on an iteration that has begun
        return (plan.batch(step, self.worker) for step in range(len(self)))

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for indices in self.batches())

    def __len__(self) -> int:
        steps = self.plan.steps
        last_is_empty = steps and not self.fill and self.plan.sizes(steps - 1)[self.worker] == 0
        return steps - bool(last_is_empty)
