"""Batches of an HDF5Dataset in torch's DataLoader: read and handed over whole, and samples for whoever asks."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map

import hpcdist as hd
from harness.cases import each
from hpcdist.data import HDF5Dataset, Split, create
from hpcdist.data.loader import Samples

N, SIZE = 21, 8
X = np.arange(N * 12, dtype=np.uint8).reshape(N, 3, 4)


class Counted(HDF5Dataset):
    """Counts the batches that it reads."""

    reads = 0

    def batch(self, indices):
        self.reads += 1
        return super().batch(indices)


@pytest.fixture
def dataset(tmp_path):
    options = {"task": "classification", "classes": list("abc"), "scale": 0.5}
    path = create(tmp_path / "a.h5", {"train": Split.of(X, np.arange(N) % 3)}, **options)
    with Counted(path) as dataset:
        yield dataset


def as_torch_joins_them(dataset, indices):
    return default_collate([dataset[i] for i in indices])


def assert_same(got, expected):
    """The same values in the same types, apart from each other, and writable."""
    assert type(got) is type(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.is_contiguous() and torch.equal(ours, theirs)
        ours.fill_(1)


def test_the_default_collation_never_takes_a_batch_apart(dataset, monkeypatch):
    monkeypatch.setattr(Samples, "data", property(lambda self: pytest.fail("the batch was taken apart")))
    for step, batch in enumerate(DataLoader(dataset, SIZE)):
        assert dataset.reads == step + 1
        x, y = dataset.batch(range(step * SIZE, min(N, (step + 1) * SIZE)))
        dataset.reads -= 1
        assert_same(batch, [x, y])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # said by Python 3.12 and later
@each("workers", [0, 2])
@each("make", [lambda d: d, lambda d: Subset(d, range(N - 1, -1, -1))])
def test_batches_are_those_that_torch_makes_of_samples(dataset, make, workers):
    chosen = make(dataset)
    batches = list(DataLoader(chosen, SIZE, num_workers=workers))
    assert [len(y) for _, y in batches] == [8, 8, 5]
    for step, batch in enumerate(batches):
        assert_same(batch, as_torch_joins_them(chosen, range(step * SIZE, min(N, (step + 1) * SIZE))))


def test_a_shuffled_loader_draws_as_from_any_data_set(dataset):
    def order(data):
        torch.manual_seed(3)
        return [y for batch in DataLoader(data, SIZE, shuffle=True) for y in batch[1].tolist()]

    assert order(dataset) == order([dataset[i] for i in range(N)])


@pytest.mark.sizes(1, 2)
@pytest.mark.virtual
def test_a_sharded_loader_gets_them_whole_too(ranks, dataset, monkeypatch):
    monkeypatch.setattr(Samples, "data", property(lambda self: pytest.fail("the batch was taken apart")))

    def body(comm):
        hd.init(comm=comm)
        return [label for _, y in hd.shard(DataLoader(dataset, SIZE), training=False) for label in y.tolist()]

    assert sorted(sum(ranks(body), [])) == sorted(i % 3 for i in range(N))


def twice(samples):
    first = default_collate(samples)
    first[0].fill_(7)
    return [*first, *default_collate(samples), samples[0][0], samples[2][0]]


def one_by_one(samples):
    return default_collate([(x.float() / 2, {"label": y}) for x, y in samples])


def changed_in_place(samples):
    samples[0][0].fill_(7)
    samples[1][0].fill_(8)
    return default_collate(samples)


def another_order(samples):
    samples.sort(key=lambda sample: -sample[1])
    return default_collate(samples)


def some_of_them(samples):
    return default_collate(samples[2:] + samples[-1:] + samples[:1])


def the_first_of_them(samples):
    return default_collate([samples[0], (samples[1][0], samples[0][1])])


def unchanged(samples):
    return samples


def doubled(tensors, *, collate_fn_map=None):
    return torch.stack([*tensors, *tensors])


def by_another_rule(samples):
    return collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: doubled})


OWN = [default_collate, twice, one_by_one, changed_in_place, another_order, some_of_them, the_first_of_them]
OWN += [unchanged, by_another_rule]


def plain(value):
    """Tensors as lists of values, and containers by their types."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, Samples)):
        return type(value) is tuple, [plain(item) for item in value]
    return value


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@each("case", [*((own, 0) for own in OWN), (another_order, 2)])
def test_a_collate_fn_of_the_users_own_gets_what_a_list_of_samples_gives(dataset, case):
    own, workers = case
    found = list(DataLoader(dataset, SIZE, collate_fn=own, num_workers=workers))
    samples = [dataset[i] for i in range(N)]
    assert plain(found) == plain([own(samples[i : i + SIZE]) for i in range(0, N, SIZE)])


def test_copies_and_pickles_are_lists_of_tuples(dataset):
    for made in (copy.copy, copy.deepcopy, list, lambda s: pickle.loads(pickle.dumps(s))):
        found = made(dataset.__getitems__([4, 3]))
        assert type(found) is list and [type(sample) for sample in found] == [tuple, tuple]
        assert plain(found) == plain([dataset[4], dataset[3]])
    assert len(dataset.__getitems__([])) == 0
    with pytest.raises(IndexError):
        default_collate(dataset.__getitems__([]))
