"""Deal out a DataLoader's samples in its samplers' order; load the same batches on all ranks of a replica."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
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

# How a DataLoader iterates. A class that does so in a way of its own can't be replaced by a plain one.
_ITERATES = ("__iter__", "_get_iterator", "_index_sampler", "_auto_collation")
_ENDLESS = 10  # epochs in one, after which a sampler is taken to have no end
_LONG = 1 << 24  # draws: a sampler that claims more has no end


class Order:
    """Deal out samples, in batches of `batch_size`, or batches that a batch sampler has made.

    Args:
        length: how many of them there are; None: as many as are drawn.
        dataset: has the samples.
        sampler: draws them, on the first worker; None: they are those of the data set, in its order or shuffled.
        batch_size: single samples per worker and step; None where a sampler draws whole batches, or batches of one.
        single: batches are single samples, which the loader does not join.
        seed, shuffle: as in EpochPlan.
        epochs: a DistributedSampler whose `set_epoch` says which epoch it is.
    """

    def __init__(
        self,
        length: Callable[[], int],
        *,
        dataset: Any,
        sampler: Any = None,
        batch_size: int | None,
        drop_last: bool = False,
        single: bool = False,
        seed: int = 0,
        shuffle: bool = False,
        epochs: DistributedSampler[Any] | None = None,
    ):
        self._length, self._sampler, self.batch_size, self.drop_last = length, sampler, batch_size, drop_last
        self._dataset = dataset
        self.single, self._seed, self._shuffle, self._epochs = single, seed, shuffle, epochs
        self._parts: Callable[[int], tuple[np.ndarray, ...]] | None = None  # each worker's samples, by their number
        self._items: list[Any] | None = None  # once drawn; a position in a plan stands for one of them
        self._ahead = False  # they are those of the next epoch

    def __len__(self) -> int:
        return self._length() if self._items is None else len(self._items)

    def settings(self) -> dict[str, Any]:
        """Return what must be the same on all workers, by names for messages."""
        kind = None if self._sampler is None else type(self._sampler).__name__
        return {
            "batch_size": self.batch_size, "drop_last": self.drop_last, "shuffle": self._shuffle,
            "sampler": kind, "seed": self._seed, "split": self._parts is not None,
        }  # fmt: skip

    def split_by_label(self, labels: np.ndarray, alpha: float, seed: int) -> None:
        """Give each worker a part of the samples, the same in all epochs; raise ConfigError where a sampler draws."""
        if self._sampler is not None:
            raise rules.error("a sampler draws what is split by label")
        self._parts = cache(lambda workers: dirichlet(labels, workers, alpha, seed))

    def take(self, group: Communicator) -> None:
        """Collective in `group` where there is a sampler. Draw an epoch on the first worker, and share it with all."""
        if self._sampler is not None and not self._ahead:
            self._items = broadcast_in(
                group, group.raise_on_all_ranks(lambda: self._draw() if group.rank == 0 else None)
            )
        self._ahead = False

    def _draw(self) -> list[Any]:
        """Draw an epoch; raise ConfigError where the sampler has no end.

        That is where it draws several times the data set, and several times its own length, which may be an estimate.
        """
        samples, told, drawn = length_hint(self._dataset, 1 << 20), None, 0
        items: list[Any] = []
        for item in self._sampler:
            items.append(item)
            drawn += max(len(item), 1) if isinstance(item, (list, tuple)) else 1
            if drawn > _ENDLESS * samples:
                told = length_hint(self._sampler, 0) if told is None else told  # some draw to tell it
                if told > _LONG or len(items) > _ENDLESS * told:
                    kind = type(self._sampler).__name__
                    raise rules.error("a sampler has no end", kind=kind, drawn=drawn, length=samples)
        return items

    def require_joint(self, group: Communicator, first: int) -> None:
        """Collective in `group`. Raise ConfigError where a sampler splits samples among ranks by itself.

        All ranks draw the next epoch with the random state of rank `first`, whose draw counts. Samplers with a state of
        their own may draw other samples, of which many are the same. Parts of a split have no sample in common, or one
        that fills up the last part.
        """
        if self._sampler is None or group.size == 1:
            return
        here = group.rank == first
        state = broadcast_in(group, random_state() if here else None, first)

        def draw() -> list[Any]:
            with nullcontext() if here else callers_state_kept():
                if not here:
                    set_random_state({name: value for name, value in state.items() if name != "cuda"})
                return self._draw()

        own = group.raise_on_all_ranks(draw)
        self._items, self._ahead = broadcast_in(group, own if here else None, first), True
        mine, theirs = ({*map(repr, self._singly(items))} for items in (own, self._items or ()))
        apart = len(mine & theirs) < max(2, min(len(mine), len(theirs)) / 4) and mine != theirs
        if any(group.gather(apart)):
            raise rules.error("the sampler splits samples already", kind=type(self._sampler).__name__)

    def _singly(self, items: Sequence[Any]) -> Iterable[Any]:
        """Return drawn samples, each by itself."""
        return items if self.batch_size is not None or self.single else chain.from_iterable(items)

    def epoch(self, counted: int) -> int:
        """Return the epoch: the loader's count, or the one that the DistributedSampler has been set to."""
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
        """Return the indices of the samples at these positions of the plan."""
        return positions if self._items is None else [self._items[position] for position in positions]

    def weight(self, plan: EpochPlan, step: int, worker: int) -> float:
        """Compute the weight of a worker's batch: its number of samples over the workers' mean number."""
        if self.batch_size is not None or self.single:
            return plan.weight(step, worker)
        items: list[Any] = self._items or []  # drawn: a plan stands on them
        counts = [sum(len(items[i]) for i in plan.indices(step, w).tolist()) for w in range(plan.workers)]
        return counts[worker] * len(counts) / sum(counts)


def order_of(loader: DataLoader[Any], seed: int) -> Order:
    """Return the order of the loader's samples; raise ConfigError where the loader iterates in a way of its own."""
    for name in _ITERATES:
        if name in vars(loader) or getattr(type(loader), name) is not getattr(DataLoader, name):
            raise rules.error("the loader iterates in a way of its own", kind=type(loader).__name__, name=name)
    batches: Any = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return Order(lambda: len(batches), dataset=loader.dataset, sampler=batches, batch_size=None)
    kind: dict[str, Any] = {"batch_size": None, "single": True, "dataset": loader.dataset}
    if batches is not None:
        kind |= {"batch_size": batches.batch_size, "drop_last": batches.drop_last, "single": False}
    sampler: Any = loader.sampler if batches is None else batches.sampler
    if type(sampler) is DistributedSampler:
        kind["drop_last"] = sampler.drop_last or kind.get("drop_last", False)
        kind |= {"seed": seed or sampler.seed, "shuffle": sampler.shuffle, "epochs": sampler}
        return Order(lambda: len(sampler.dataset), **kind)  # type: ignore[arg-type]
    permutes = type(sampler) is RandomSampler and sampler.num_samples == len(sampler.data_source)
    if type(sampler) is SequentialSampler or (permutes and not sampler.replacement):
        return Order(lambda: len(sampler), seed=seed, shuffle=permutes, **kind)
    return Order(lambda: len(sampler), sampler=sampler, **kind)


def iter_apart(loader: Any, worker: int) -> Iterator[Any]:
    """Begin an epoch of a loader whose processes draw the random numbers of this worker.

    Their seed follows from (the number that torch draws for the epoch, worker), so that augmentations differ between
    ranks of one seed. The random state goes on as it would without this.
    """
    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        return iter(loader)
    given = loader.generator
    base = int(torch.empty((), dtype=torch.int64).random_(generator=given))
    seed = np.random.SeedSequence(base, spawn_key=(worker,)).generate_state(1, np.uint64)[0] >> np.uint64(1)
    loader.generator = torch.Generator().manual_seed(int(seed))
    try:
        return iter(loader)
    finally:
        loader.generator = given


# --- equal batches on all ranks of a replica --------------------------------------------------------------------------
def identical_batches(loader: DataLoader[Any], inner: Communicator, place: tuple[int, int, int, int]) -> Iterator[Any]:
    """Collective in the replica. Iterate over batches that are the same on all its ranks.

    Whatever is drawn while a batch is loaded follows from its place, so that a resumed epoch goes on alike, and the
    random numbers of the ranks, which compute different layers, may differ.

    Args:
        inner: the ranks of the replica.
        place: seed, epoch, replica, and the samples of the epoch before the first batch.

    Raises:
        MismatchError: the ranks' first batches differ, for the data set draws from elsewhere, or asks for the rank.
    """
    with seeded(place, "begin"):
        batches = iter(loader)
    for step in count():
        with seeded(place, step):
            batch = next(batches, _END)
        if step == 0:
            require_same(inner, batch)
        if batch is _END:
            return
        yield batch


_END = object()


@contextmanager
def seeded(place: tuple[int, ...], step: int | str) -> Iterator[None]:
    """Draw the random numbers of Python, NumPy and torch from a seed inside the context; afterwards one's own again."""
    seed = zlib.crc32(repr((place, step)).encode())
    with callers_state_kept():
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        yield
