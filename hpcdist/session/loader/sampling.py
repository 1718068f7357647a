"""Find the order in which a DataLoader's samplers want samples, and share it among workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from hpcdist.data.sharding import EpochPlan
from hpcdist.session import rules


class Order:
    """Deal out samples, in batches of `batch_size`, or batches that a batch sampler has made.

    Args:
        length: how many of them there are; None: as many as are drawn.
        sampler: draws them, on the first worker; None: they are those of the data set, in its order or shuffled.
        batch_size: samples per worker and step; None where a sampler draws whole batches, or batches of one.
        single: batches are single samples, which the loader does not join.
        seed, shuffle: as in EpochPlan.
        epochs: a DistributedSampler whose `set_epoch` says which epoch it is.
    """

    def __init__(
        self,
        length: Callable[[], int],
        *,
        sampler: Any = None,
        batch_size: int | None,
        drop_last: bool = False,
        single: bool = False,
        seed: int = 0,
        shuffle: bool = False,
        epochs: DistributedSampler[Any] | None = None,
    ):
        self._length, self._sampler, self._batch_size, self.drop_last = length, sampler, batch_size, drop_last
        self.single, self._seed, self._shuffle, self._epochs = single, seed, shuffle, epochs
        self._items: list[Any] | None = None  # once drawn; a position in a plan stands for one of them

    def __len__(self) -> int:
        return self._length() if self._items is None else len(self._items)

    def settings(self) -> dict[str, Any]:
        """Return what must be the same on all workers, by names for messages."""
        kind = None if self._sampler is None else type(self._sampler).__name__
        return {
            "batch_size": self._batch_size, "drop_last": self.drop_last, "shuffle": self._shuffle,
            "sampler": kind, "seed": self._seed,
        }  # fmt: skip

    def take(self, share: Callable[[Any], list[Any]], draws: bool) -> None:
        """Collective where there is a sampler. Draw an epoch on the worker that `draws`, and `share` it with all."""
        if self._sampler is not None:
            self._items = share(list(self._sampler) if draws else None)

    def epoch(self, counted: int) -> int:
        """Return the epoch: the loader's count, or the one that the DistributedSampler has been set to."""
        set_epoch = self._epochs.epoch if self._epochs is not None else 0
        return set_epoch or counted

    def plan(self, workers: int, epoch: int = 0, start: int = 0) -> EpochPlan:
        """Plan the distribution of samples over workers and steps."""
        return EpochPlan(
            len(self), workers, self._batch_size or 1, seed=self._seed, epoch=max(epoch, 0), shuffle=self._shuffle,
            start=start,
        )  # fmt: skip

    def batch(self, plan: EpochPlan, step: int, worker: int) -> Any:
        """Return the indices of a worker's batch, never empty; see `EpochPlan.batch`."""
        positions = plan.batch(step, worker).tolist()
        items = self.items(positions)
        return items if self._batch_size is not None else items[0]

    @property
    def deals_samples(self) -> bool:
        """Tell whether batches are made of single samples, `batch_size` of them, in any number."""
        return self._batch_size is not None

    def items(self, positions: list[int]) -> list[Any]:
        """Return the indices of the samples at these positions of the plan."""
        return positions if self._items is None else [self._items[position] for position in positions]

    def weight(self, plan: EpochPlan, step: int, worker: int) -> float:
        """Compute the weight of a worker's batch: its number of samples over the workers' mean number."""
        if self._batch_size is not None or self.single:
            return plan.weight(step, worker)
        items: list[Any] = self._items or []  # drawn: a plan stands on them
        counts = [sum(len(items[i]) for i in plan.indices(step, w).tolist()) for w in range(plan.workers)]
        return counts[worker] * len(counts) / sum(counts)


def order_of(loader: DataLoader[Any], seed: int) -> Order:
    """Find the order in which the loader's samples are dealt out.

    Raises:
        ConfigError: its sampler picks samples for other ranks than hpcdist's.
    """
    batches: Any = loader.batch_sampler
    if batches is None:
        return _sampled(loader.sampler, loader, None, False, seed, single=True)
    if type(batches) is BatchSampler:
        return _sampled(batches.sampler, loader, batches.batch_size, batches.drop_last, seed)
    _require_all_samples(batches)
    return Order(lambda: len(batches), sampler=batches, batch_size=None)


def _sampled(
    sampler: Any, loader: DataLoader[Any], batch_size: int | None, drop_last: bool, seed: int, single: bool = False
) -> Order:
    kind: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last, "single": single}
    if type(sampler) is DistributedSampler:
        kind |= {"seed": seed or sampler.seed, "shuffle": sampler.shuffle, "epochs": sampler}
        kind["drop_last"] = drop_last or sampler.drop_last
        return Order(lambda: len(sampler.dataset), **kind)  # type: ignore[arg-type]
    _require_all_samples(sampler)
    if type(sampler) is SequentialSampler or _is_permutation(sampler):
        return Order(lambda: len(sampler), seed=seed, shuffle=type(sampler) is RandomSampler, **kind)
    return Order(lambda: len(sampler), sampler=sampler, **kind)


def _is_permutation(sampler: Any) -> bool:
    if type(sampler) is not RandomSampler:
        return False
    return sampler.num_samples == len(sampler.data_source) and not sampler.replacement


def _require_all_samples(sampler: Any) -> None:
    if hasattr(sampler, "num_replicas"):
        raise rules.error("the sampler splits samples already", kind=type(sampler).__name__)
