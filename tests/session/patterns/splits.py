"""Samplers, loaders, streams and data sets that split samples by themselves, or differ between ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)

import hpcdist as hd
from patterns.run import BATCH, N, data, train, training
from patterns.samples import RANKS, Numbered, all_of, numbered, worker


# --- samplers that split by themselves --------------------------------------------------------------------------------
class Part(Sampler):
    """Every size-th sample, or batch of 4, without a word of that in an attribute."""

    def __init__(self, n, rank, size, batch=0):
        self.items = [n for n in range(rank, n, size)]
        self.batches = [list(range(i, i + batch)) for i in range(rank * batch, n, size * batch)] if batch else []

    def __iter__(self):
        return iter(self.batches or self.items)

    def __len__(self):
        return len(self.batches or self.items)


class Named(Part):
    """As those of mmengine and detectron2."""

    def __init__(self, n, rank, size):
        super().__init__(n, rank, size)
        self._rank, self._world_size = rank, size


class Grouped(Sampler):
    """Batches of the samples of another sampler, as torchvision's GroupedBatchSampler."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        indices = list(self.sampler)
        return iter([indices[i : i + 4] for i in range(0, len(indices), 4)])

    def __len__(self):
        return -(-len(self.sampler) // 4)


def _splitting(name, make):
    """Puts a loop into the table whose sampler splits samples by itself; in one process it takes all."""

    def loop(run, model, optimizer):
        torch.manual_seed(run.rank)
        kind, sampler = make(run.rank, run.size)
        loader = DataLoader(Numbered(24), **({"batch_size": 4} if kind == "sampler" else {}), **{kind: sampler})
        train(run, model, optimizer, lambda: ((x, y) for x, y, _ in (hd.shard(loader) if run.size > 1 else loader)), 1)

    loop.__name__ = f"a_split_by_{name}"
    training(0.05, exact=False, ways=("joint", "one", "many"), breaks="the sampler splits samples already")(loop)


_splitting("names", lambda rank, size: ("sampler", Named(24, rank, size)))
_splitting("what_it_draws", lambda rank, size: ("sampler", Part(24, rank, size)))
_splitting("a_sampler_of_an_own_part", lambda rank, size: ("sampler", SubsetRandomSampler(range(rank, 24, size))))
_splitting("a_sampler_in_torchs_batches", lambda r, s: ("batch_sampler", BatchSampler(Part(24, r, s), 4, False)))
_splitting("a_batch_sampler", lambda rank, size: ("batch_sampler", Part(24, rank, size, 4)))
_splitting(
    "a_sampler_inside_of_another",
    lambda rank, size: ("batch_sampler", Grouped(DistributedSampler(Numbered(24), size, rank))),
)


class OwnState(Sampler):
    """Draws all samples, by a generator that is another one on each rank."""

    def __init__(self, n, rank):
        self.n, self.generator = n, torch.Generator().manual_seed(rank)

    def __iter__(self):
        return iter(torch.randperm(self.n, generator=self.generator).tolist())

    def __len__(self):
        return self.n


numbered(
    "a_sampler_with_a_state_of_its_own", lambda r: r.loader(Numbered(29), sampler=OwnState(29, r.rank)), all_of(29)
)


class Cached(DataLoader):
    """Iterates in a way of its own, as PyG's NeighborLoader and MONAI's ThreadDataLoader."""

    def __iter__(self):
        return map(lambda batch: (batch[0] * 2, batch[1]), super().__iter__())


class Transforming(DataLoader):
    def _get_iterator(self):
        return map(lambda batch: (batch[0] * 2, batch[1]), super()._get_iterator())


def _own_iteration(name, cls, split):
    def loop(run, model, optimizer):
        dataset = data(24) if split else TensorDataset(*(t[worker(run) :: run.workers] for t in data(24).tensors))
        loader = cls(dataset, 4)
        train(run, model, optimizer, loader if run.size == 1 else hd.shard(loader, split=split), 1)

    loop.__name__ = f"a_loader_with_its_own_{name}"
    training(exact=False, ways=RANKS, breaks="the loader overrides how it iterates" if split else ())(loop)


_own_iteration("iter", Cached, True)
_own_iteration("iterator", Transforming, True)
_own_iteration("iter_of_a_part", Cached, False)


# --- streams ---
@dataclass
class Labelled:
    """A batch without a tensor at its top."""

    pair: Any
    number: int


class Masked(IterableDataset):
    """Single samples behind a mask of ones, of every size-th one; or dataclasses."""

    def __init__(self, n, first, step, plain):
        self.dataset, self.positions, self.plain = Numbered(n), range(first, n, step), plain

    def __iter__(self):
        for i in self.positions:
            x, y, _ = self.dataset[i]
            yield {"mask": torch.ones(4), "pair": (x, y), "number": i} if self.plain else Labelled((x, y), i)


def _masked(name, plain, split_by_rank):
    """All samples count once, whether the stream or hpcdist splits them."""

    def loop(run, model, optimizer):
        position = (worker(run), run.workers) if split_by_rank else (0, 1)
        loader = DataLoader(Masked(24, *position, plain), batch_size=None)
        found = []

        def batches():
            sharded = hd.shard(loader) if run.size > 1 else loader
            for batch in sharded:
                got = batch if plain else vars(batch)
                yield got["pair"][0][None], got["pair"][1][None]
                if run.size == 1 or sharded.weight:
                    found.append(got["number"])

        train(run, model, optimizer, batches, 1)
        numbers = found if run.size == 1 else [n for part in hd.allgather(found) for n in part]
        assert sorted(numbers) == list(range(24)), numbers

    loop.__name__ = f"a_stream_of_{name}"
    training(0.02, exact=False, ways=RANKS)(loop)


_masked("equal_masks_split_by_rank", True, True)
_masked("equal_masks", True, False)
_masked("dataclasses_split_by_rank", False, True)
_masked("dataclasses", False, False)


@training(exact=False, ways=RANKS, breaks="batches can't be compared")
def a_stream_that_can_t_be_compared(run, model, optimizer):
    class Lazy(IterableDataset):
        def __iter__(self):
            return iter([lambda: data(4).tensors] * 6)

    loader = DataLoader(Lazy(), batch_size=None)
    train(run, model, optimizer, lambda: (b() for b in (hd.shard(loader) if run.size > 1 else loader)), 1)


# --- data sets ---
OTHER_SAMPLES = r"loader must be the same on all workers, which share its samples; "


def _other_samples(name, make, message, batch=lambda rank: BATCH):
    """Puts a loop into the table in which each rank has other samples."""

    def loop(run, model, optimizer):
        loader = DataLoader(make(run.rank), batch_size=batch(run.rank))
        train(run, model, optimizer, hd.shard(loader) if run.size > 1 else loader)

    loop.__name__ = name
    training(ways=("joint",), exact=False, refused={"*": OTHER_SAMPLES + message})(loop)


def _permuted(rank):
    order = torch.randperm(N, generator=torch.Generator().manual_seed(rank))
    return TensorDataset(*(tensor[order] for tensor in data().tensors))


_other_samples("samples_permuted_by_each_ranks_seed", _permuted, "the sum of rows of loader.dataset.tensors.0. is")
_other_samples("another_batch_size_on_each_rank", lambda rank: data(), "batch_size is", batch=lambda rank: BATCH + rank)


class Wrapped(torch.utils.data.Dataset):
    def __init__(self, **held):
        vars(self).update(held)

    def __len__(self):
        return N

    def __getitem__(self, index):
        return data()[index]


def _drawn(rank):
    return torch.utils.data.random_split(data(N + 8), [N, 8], torch.Generator().manual_seed(rank))[0]


OTHER_HELD = {  # by name: what is compared, and what a data set of each rank holds
    "split_in_a_wrapper": ("subset.inner.indices", lambda rank: Wrapped(subset=Wrapped(inner=_drawn(rank)))),
    "split_among_others": (r"datasets.0..indices", lambda rank: torch.utils.data.ConcatDataset([_drawn(rank)])),
    "order": ("files", lambda rank: Wrapped(files=[(f"/node{rank}/{(i + rank) % N}.png", 0) for i in range(N)])),
    "labels": ("y", lambda rank: Wrapped(y=[0.5 + rank * i for i in range(N)])),
}
for name, (held, make) in OTHER_HELD.items():
    _other_samples(f"another_{name}_on_each_rank", make, f"the checksum of loader.dataset.{held} is")
_other_samples(
    "another_file_on_each_rank", lambda rank: Wrapped(path=(__file__, torch.__file__)[rank > 0]),
    "the file of loader.dataset.path is",
)  # fmt: skip


@training(exact=False, ways=("joint",))
def files_in_each_nodes_folder(run, model, optimizer):
    """Names without folders are the same; caches, seeds and other things of a rank's own are not compared."""
    held = {"files": [f"/node{run.rank}/{i}.png" for i in range(N)], "seed": run.rank, "cache": [None] * run.rank}
    train(run, model, optimizer, run.loader(Wrapped(**held, root=f"/node{run.rank}")), 1)
