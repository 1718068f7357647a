"""Loader and ShardedBatchSampler: one worker's batches of an epoch, in order."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from hpcdist import data
from hpcdist.data import EpochPlan, Loader, ShardedBatchSampler
from hpcdist.errors import ConfigError

N = 47


class Numbers:
    """Sample i is (i, -i); reading `broken` fails."""

    def __init__(self, n: int = N, broken: int | None = None):
        self.n, self.broken, self.batches = n, broken, []

    def __len__(self) -> int:
        return self.n

    def batch(self, indices):
        if self.broken in indices:
            raise OSError(f"sample {self.broken} can't be read")
        self.batches.append(indices)
        x = torch.as_tensor(indices)
        return x, -x


def read(loader) -> list[list[int]]:
    batches = [(x.tolist(), y.tolist()) for x, y in loader]
    assert all(y == [-i for i in x] for x, y in batches)
    return [x for x, _ in batches]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hpcdist-prefetch")]


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 60),
    workers=st.integers(1, 9),
    batch_size=st.integers(1, 9),
    shuffle=st.booleans(),
    prefetch=st.sampled_from([0, 1, 3, 100]),
    epoch=st.integers(0, 2),
    start=st.integers(0, 60),
)
def test_yields_the_plans_batches_that_are_not_empty(n, workers, batch_size, shuffle, prefetch, epoch, start):
    everything = []
    for worker in range(workers):
        options = {"worker": worker, "workers": workers, "seed": 5, "shuffle": shuffle, "prefetch": prefetch}
        loader = Loader(Numbers(n), batch_size, **options)
        loader.set_epoch(epoch, min(start, n))
        plan = EpochPlan(n, workers, batch_size, seed=5, epoch=epoch, shuffle=shuffle, start=min(start, n))
        assert loader.plan == plan
        batches = read(loader)
        assert batches == [plan.indices(s, worker).tolist() for s in range(plan.steps) if plan.sizes(s)[worker]]
        assert len(batches) == len(loader)
        everything += sum(batches, [])
    order = sum(read(Loader(Numbers(n), n, seed=5, shuffle=shuffle)), [])
    assert len(everything) == n - min(start, n) and len(set(everything)) == len(everything) and len(order) == n
    assert not threads()


def test_an_iteration_under_way_keeps_its_epoch_and_epochs_differ():
    loader = Loader(Numbers(), 5)
    first, batches = read(loader), iter(loader)
    started = [next(batches)]
    loader.set_epoch(1)
    assert read([*started, *batches]) == first != read(loader)


def test_prefetch_reads_ahead_by_as_much_as_it_says_in_one_thread():
    """As many batches as `prefetch`, whatever the consumer does."""
    names, read_so_far = set(), threading.Semaphore(0)

    class Noted(Numbers):
        def batch(self, indices):
            names.add(threading.current_thread().name)
            read_so_far.release()
            return super().batch(indices)

    dataset = Noted()
    batches = iter(Loader(dataset, 5, prefetch=2))
    next(batches)
    for _ in range(3):  # the one that was taken, and two ahead
        assert read_so_far.acquire(timeout=30)
    assert not read_so_far.acquire(timeout=0.2)
    assert len(dataset.batches) == 3 and len(names) == 1 and threads() == list(names)
    batches.close()
    assert not threads()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_reaches_the_consumer_in_its_place(prefetch):
    loader = Loader(Numbers(broken=23), 5, shuffle=False, prefetch=prefetch)
    seen = []
    with pytest.raises(OSError, match="sample 23 can't be read"):
        for x, _ in loader:
            seen += x.tolist()
    assert seen == list(range(20)) and not threads()


def test_no_thread_is_left_after_a_break_or_an_error_of_the_consumer():
    loader = Loader(Numbers(), 5, prefetch=2)
    for _ in loader:
        break
    assert not threads() and len(read(loader)) == 10
    with pytest.raises(KeyError):
        for _ in loader:
            raise KeyError
    assert not threads()


def test_sampler_in_a_dataloader():
    dataset = TensorDataset(torch.arange(N), -torch.arange(N))
    sampler = ShardedBatchSampler(EpochPlan(N, 3, 4, seed=2), worker=2)
    loader = DataLoader(dataset, batch_sampler=sampler)
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        batches = read(loader)
        plan = EpochPlan(N, 3, 4, seed=2, epoch=epoch)
        assert batches == [plan.indices(step, 2).tolist() for step in range(plan.steps)]
        assert len(loader) == len(batches)


def test_sampler_resumes():
    sampler = ShardedBatchSampler(EpochPlan(N, 1, 4, seed=2))
    whole = list(sampler)
    sampler.set_epoch(0, start=sampler.plan.position(3))
    assert list(sampler) == whole[3:]
    sampler.set_epoch(0, start=N)
    assert list(sampler) == [] and len(sampler) == 0


def test_what_does_not_exist_is_refused():
    for worker in (-1, 2):
        for make in (lambda: Loader(Numbers(), 5, worker=worker, workers=2),
                     lambda: ShardedBatchSampler(EpochPlan(N, 2, 5), worker)):  # fmt: skip
            with pytest.raises(ConfigError, match=rf"worker must be in 0\.\.1; got {worker}."):
                make()
    with pytest.raises(ConfigError, match="prefetch must be at least 0; got -1."):
        Loader(Numbers(), 5, prefetch=-1)
    with pytest.raises(AttributeError, match="module 'hpcdist.data' has no attribute 'HDF6Dataset'"):
        _ = data.HDF6Dataset
