"""Distribute samples in the order of a DataLoader's samplers; load identical batches on all ranks of a replica."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import chain, count
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from hpcdist.checkpoint.generators import random_state, set_random_state
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.virtual.random import callers_state_kept
from hpcdist.data.labels import dirichlet
from hpcdist.data.sharding import EpochPlan
from hpcdist.session import rules
from hpcdist.session.loader.batches import require_same
from hpcdist.session.values import broadcast_in

# Methods by which a DataLoader iterates. A class that overrides one can't be replaced by a plain DataLoader.
_ITERATES = ("__iter__", "_get_iterator", "_index_sampler", "_auto_collation")
_ENDLESS = 10  # a sampler that yields more than this many epochs' samples in one is regarded as endless
_LONG = 1 << 24  # a sampler with a larger length is regarded as endless


class Order:
    """The order in which samples, or batches of a batch sampler, are distributed.

    Args:
        length: () -> number of samples or batches.
        dataset: the data set.
        sampler: yields indices, on the first worker; None: the data set's order, or a shuffled one.
        batch_size: samples per worker and step; None if the sampler yields whole batches, or batches are samples.
        single: batches are single samples, without collation.
        seed, shuffle: as in EpochPlan.
        epochs: a DistributedSampler whose `set_epoch` sets the epoch.
    """

    def __init__(
        self, length: Callable[[], int], *, dataset: Any, sampler: Any = None, batch_size: int | None,
        drop_last: bool = False, single: bool = False, seed: int = 0, shuffle: bool = False,
        epochs: DistributedSampler[Any] | None = None,
    ):  # fmt: skip
        self._length, self._sampler, self.batch_size, self.drop_last = length, sampler, batch_size, drop_last
        self._dataset = dataset
        self.single, self._seed, self._shuffle, self._epochs = single, seed, shuffle, epochs
        self._parts: Callable[[int], tuple[np.ndarray, ...]] | None = None  # (number of workers) -> indices of each one
        self._items: list[Any] | None = None  # yielded by the sampler; a plan's positions refer to it
        self._ahead = False  # `_items` belongs to the next epoch

    def __len__(self) -> int:
        return self._length() if self._items is None else len(self._items)

    def settings(self) -> dict[str, Any]:
        """Return the settings that must be the same on all workers, by name."""
        kind = None if self._sampler is None else type(self._sampler).__name__
        return {
            "batch_size": self.batch_size, "drop_last": self.drop_last, "shuffle": self._shuffle,
            "sampler": kind, "seed": self._seed, "split": self._parts is not None,
        }  # fmt: skip

    def split_by_label(self, labels: np.ndarray, alpha: float, seed: int) -> None:
        """Give each worker the same part of the samples in all epochs; raise ConfigError if there is a sampler."""
        if self._sampler is not None:
            raise rules.error("a loader with a sampler is split by label")
        self._parts = cache(lambda workers: dirichlet(labels, workers, alpha, seed))

    def take(self, group: Communicator) -> None:
        """Collective in `group` if there is a sampler. Sample an epoch on the first worker, and broadcast it."""
        if self._sampler is not None and not self._ahead:
            self._items = broadcast_in(
                group, group.raise_on_all_ranks(lambda: self._sample() if group.rank == 0 else None)
            )
        self._ahead = False

    def _sample(self) -> list[Any]:
        """Return the sampler's indices of an epoch; raise ConfigError if the sampler is endless.

        It is endless if it yields several times the data set and several times its length (perhaps an estimate).
        """
        n_samples, length, n_indices = length_hint(self._dataset, 1 << 20), None, 0
        items: list[Any] = []
        for item in self._sampler:
            items.append(item)
            n_indices += max(len(item), 1) if isinstance(item, (list, tuple)) else 1
            if n_indices > _ENDLESS * n_samples:
                length = length_hint(self._sampler, 0) if length is None else length  # `len` may use random numbers
                if length > _LONG or len(items) > _ENDLESS * length:
                    kind = type(self._sampler).__name__
                    raise rules.error("a sampler has no end", kind=kind, drawn=n_indices, length=n_samples)
        return items

    def require_unsplit_sampler(self, group: Communicator, first: int) -> None:
        """Collective in `group`. Raise ConfigError if the sampler itself splits samples among ranks.

        All ranks sample the next epoch with the random state of rank `first`, whose result is used. A sampler that
        splits yields disjoint indices on two ranks (padding may repeat a few); other samplers with separate random
        state yield different, overlapping ones.
        """
        if self._sampler is None or group.size == 1:
            return
        is_first = group.rank == first
        state = broadcast_in(group, random_state() if is_first else None, first)

        def sample() -> list[Any]:
            with nullcontext() if is_first else callers_state_kept():
                if not is_first:
                    set_random_state({name: value for name, value in state.items() if name != "cuda"})
                return self._sample()

        local = group.raise_on_all_ranks(sample)
        self._items, self._ahead = broadcast_in(group, local if is_first else None, first), True
        batches = self.batch_size is None and not self.single
        both = (chain.from_iterable(items) if batches else items for items in (local, self._items or ()))
        indices, firsts = ({*map(repr, items)} for items in both)
        disjoint = len(indices & firsts) < max(2, min(len(indices), len(firsts)) / 4) and indices != firsts
        if any(group.gather(disjoint)):
            raise rules.error("the sampler splits samples already", kind=type(self._sampler).__name__)

    def epoch(self, counted: int) -> int:
        """Return the epoch that a DistributedSampler was set to; else the loader's count."""
        set_epoch = self._epochs.epoch if self._epochs is not None else 0
        return set_epoch or counted

    def plan(self, workers: int, epoch: int = 0, start: int = 0) -> EpochPlan:
        """Plan the distribution of samples over workers and steps."""
        return EpochPlan(
            len(self), workers, self.batch_size or 1, seed=self._seed, epoch=max(epoch, 0), shuffle=self._shuffle,
            start=start, parts=() if self._parts is None else self._parts(workers),
        )  # fmt: skip

    def batch(self, plan: EpochPlan, step: int, worker: int) -> Any:
        """Return the indices of a worker's batch, never empty; see `EpochPlan.batch`."""
        positions = plan.batch(step, worker).tolist()
        items = self.items(positions)
        return items if self.batch_size is not None else items[0]

    def items(self, positions: list[int]) -> list[Any]:
        """Return the items at these positions of the plan: indices of samples or batches."""
        return positions if self._items is None else [self._items[position] for position in positions]

    def weight(self, plan: EpochPlan, step: int, worker: int) -> float:
        """Return the weight of a worker's batch: its number of samples divided by the workers' mean number."""
        if self.batch_size is not None or self.single:
            return plan.weight(step, worker)
        items: list[Any] = self._items or []  # set by `take`, before there is a plan
        counts = [sum(len(items[i]) for i in plan.indices(step, w).tolist()) for w in range(plan.workers)]
        return counts[worker] * len(counts) / sum(counts)


def sample_order(loader: DataLoader[Any], seed: int) -> Order:
    """Return the order of the loader's samples; raise ConfigError if its class overrides how it iterates."""
    for name in _ITERATES:
        if name in vars(loader) or getattr(type(loader), name) is not getattr(DataLoader, name):
            raise rules.error("the loader overrides how it iterates", kind=type(loader).__name__, name=name)
    batch_sampler: Any = loader.batch_sampler
    if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        return Order(lambda: len(batch_sampler), dataset=loader.dataset, sampler=batch_sampler, batch_size=None)
    options: dict[str, Any] = {"batch_size": None, "single": True, "dataset": loader.dataset}
    if batch_sampler is not None:
        options |= {"batch_size": batch_sampler.batch_size, "drop_last": batch_sampler.drop_last, "single": False}
    sampler: Any = loader.sampler if batch_sampler is None else batch_sampler.sampler
    if type(sampler) is DistributedSampler:
        options["drop_last"] = sampler.drop_last or options.get("drop_last", False)
        options |= {"seed": seed or sampler.seed, "shuffle": sampler.shuffle, "epochs": sampler}
        return Order(lambda: len(sampler.dataset), **options)  # type: ignore[arg-type]
    permutes = type(sampler) is RandomSampler and sampler.num_samples == len(sampler.data_source)
    if type(sampler) is SequentialSampler or (permutes and not sampler.replacement):
        return Order(lambda: len(sampler), seed=seed, shuffle=permutes, **options)
    return Order(lambda: len(sampler), sampler=sampler, **options)


def iterate_with_worker_seed(loader: Any, worker: int) -> Iterator[Any]:
    """Start an epoch of a loader; its processes get a random seed that differs between ranks, by the rank's `worker`.

    The seed is derived from (torch's base seed of the epoch, worker), so that augmentations differ between ranks with
    the same seed. The random state continues as it would otherwise.
    """
    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        return iter(loader)
    generator = loader.generator
    base = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
    seed = np.random.SeedSequence(base, spawn_key=(worker,)).generate_state(1, np.uint64)[0] >> np.uint64(1)
    loader.generator = torch.Generator().manual_seed(int(seed))
    try:
        return iter(loader)
    finally:
        loader.generator = generator


# --- equal batches on all ranks of a replica --------------------------------------------------------------------------
def identical_batches(loader: DataLoader[Any], inner: Communicator, key: tuple[int, int, int, int]) -> Iterator[Any]:
    """Collective in the replica. Iterate over batches that are identical on all ranks of the replica.

    While a batch is loaded, random numbers are seeded by (`key`, step): a resumed epoch continues identically, and the
    ranks, which compute different layers, keep different random states.

    Args:
        inner: the ranks of the replica.
        key: seed, epoch, replica, and the number of the epoch's samples before the first batch.

    Raises:
        MismatchError: the ranks' first batches differ: the data set uses other random numbers, or the rank.
    """
    with seeded(key, "begin"):
        batches = iter(loader)
    for step in count():
        with seeded(key, step):
            batch = next(batches, _END)
        if step == 0:
            require_same(inner, batch)
        if batch is _END:
            return
        yield batch


_END = object()


@contextmanager
def seeded(key: tuple[int, ...], step: int | str) -> Iterator[None]:
    """Seed Python, NumPy and torch by (key, step) inside the context; restore their random states afterwards."""
    seed = zlib.crc32(repr((key, step)).encode())
    with callers_state_kept():
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        yield
