"""One worker's batches of an epoch: from our loader, or from torch's DataLoader."""

from __future__ import annotations

from collections import UserList, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Sampler
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from hpcdist.data.sharding import EpochPlan
from hpcdist.errors import ConfigError

Batch = tuple[Tensor, Tensor]
Sample = tuple[Tensor, ...]


class Loader:
    """The (x, y) batches of one worker, in the current epoch's order.

    If the last step has no sample for this worker, it yields nothing for that step; `plan.sizes(step)` has the batch
    sizes of all. With `fill` it yields a batch of weight 0 then (`EpochPlan.batch`, `EpochPlan.weight`).

    Args:
        dataset: `HDF5Dataset`, or any other with a length and a method `batch(indices)`. One whose samples differ
            between epochs has `set_epoch(epoch)`; one that reads ahead by itself has `read_ahead(indices)`, which
            iterates over all batches of an epoch.
        batch_size: Samples per worker and step.
        worker, workers: This worker's number, and the number of workers.
        seed, shuffle, parts: As in EpochPlan.
        fill: Yield a batch in every step.
        prefetch: Batches that a background thread reads ahead; 0 reads in the caller's thread. The thread ends with
            its iteration.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        worker: int = 0,
        workers: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        fill: bool = False,
        prefetch: int = 0,
        parts: tuple[np.ndarray, ...] = (),
    ):
        if prefetch < 0:
            raise ConfigError(f"prefetch must be at least 0; got {prefetch}.")
        self.dataset, self.prefetch = dataset, prefetch
        self._sampler = ShardedBatchSampler(
            EpochPlan(len(dataset), workers, batch_size, seed=seed, shuffle=shuffle, parts=parts), worker, fill=fill
        )

    @property
    def plan(self) -> EpochPlan:
        """The current epoch's plan."""
        return self._sampler.plan

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Go to `epoch`, after its first `start` samples (`plan.position` of the interrupted run)."""
        self._sampler.set_epoch(epoch, start)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        batches = self._sampler.batches()
        if hasattr(self.dataset, "read_ahead"):
            return self.dataset.read_ahead(batches)
        return map(self.dataset.batch, batches) if not self.prefetch else self._ahead(batches)

    def _ahead(self, batches: Iterator[np.ndarray]) -> Iterator[Batch]:
        """Yield the batches in order, while a thread reads the next `prefetch` ones."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="hpcdist-prefetch")
        try:
            pending = deque(thread.submit(self.dataset.batch, indices) for indices in islice(batches, self.prefetch))
            while pending:
                batch = pending.popleft().result()
                pending.extend(thread.submit(self.dataset.batch, indices) for indices in islice(batches, 1))
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
        plan = self.plan  # set_epoch has no effect on an iteration that has started
        return (plan.batch(step, self.worker) for step in range(len(self)))

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for indices in self.batches())

    def __len__(self) -> int:
        steps = self.plan.steps
        last_is_empty = steps and not self.fill and self.plan.weight(steps - 1, self.worker) == 0  # for this worker
        return steps - bool(last_is_empty)


# --- whole batches in torch's DataLoader ------------------------------------------------------------------------------
class Samples(UserList[Sample]):
    """A whole batch that acts as the list of its samples (x, y).

    torch's `default_collate` looks only at the first sample and gets the batch as it was read: to split it into 128
    small images and join them again takes several times as long as to read it. Other collate functions get views of
    the batch. Copies and pickles are plain lists.
    """

    _batch: Sample | None
    _source: tuple[Callable[[Sequence[int]], Sample], Sequence[int]]

    @classmethod
    def of(cls, read: Callable[[Sequence[int]], Sample], indices: Sequence[int]) -> Samples:
        samples = cls.__new__(cls)
        samples._batch, samples._source = read(indices), (read, indices)
        return samples

    @cached_property
    def data(self) -> list[Sample]:  # type: ignore[override]
        return list(zip(*(tensor.unbind() for tensor in self._whole())))

    def hand_over(self) -> list[Tensor] | None:
        """Return the batch to a new owner, who may write to it; None if it was split, as samples may have changed."""
        if "data" in self.__dict__:
            return None
        batch, self._batch = self._whole(), None
        return list(batch)

    def _whole(self) -> Sample:
        if self._batch is None:  # handed over
            read, indices = self._source
            self._batch = read(indices)
        return self._batch

    def __getitem__(self, index: Any) -> Any:
        if index == 0 and "data" not in self.__dict__:
            x, y = self._whole()
            return First((x[0], y[0]))
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.data)

    def __copy__(self) -> list[Sample]:  # type: ignore[override]
        return list(self.data)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.data,)


class First(Sample):
    """The first sample of a whole batch; by this type torch's `default_collate` finds `join`."""

    __slots__ = ()


def join(samples: Any, *, collate_fn_map: Any) -> Any:
    """Return a whole batch as it was read if torch would stack its samples; else collate them as torch does."""
    stacks = collate_fn_map.get(Tensor) is collate_tensor_fn and tuple not in collate_fn_map
    batch = samples.hand_over() if stacks and isinstance(samples, Samples) else None
    return collate([tuple(s) for s in samples], collate_fn_map=collate_fn_map) if batch is None else batch


default_collate_fn_map[First] = join
