"""Loaders, samplers and what is asked of other ranks between batches."""

from __future__ import annotations

import torch
from torch.optim import SGD
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

import hpcdist as hd
from habits import groups
from habits.run import BATCH, EPOCHS, copied, data, difference, habit, mse, net, train

RANKS = ("joint", "many")


def _sgd(run, model, lr=0.1, **given):
    return run.optimizer(SGD(model.parameters(), lr=lr, **given), model)


def _seen(run, indices) -> None:
    """All samples that the workers have had, for `Run.same`."""
    run.same = tuple(sorted(indices))


class Numbered(torch.utils.data.Dataset):
    """Samples with their numbers."""

    def __init__(self, n: int):
        self.tensors = data(n).tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int):
        return self.tensors[0][index], self.tensors[1][index], index


def _train_numbered(run, model, optimizer, loader, epochs=1) -> list[int]:
    """The plain loop; the numbers of the samples that counted, on all ranks together."""
    found: list[int] = []
    for _ in range(epochs):
        for x, y, index in loader:
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
            if run.size == 1 or loader.weight:
                found += torch.atleast_1d(torch.as_tensor(index)).tolist()
    if run.size == 1:
        return sorted(found)
    return sorted(n for part in hd.allgather(found) for n in part)


class Backwards(Sampler):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n - 1, -1, -1))

    def __len__(self):
        return self.n


@habit(ways=RANKS)
def a_sampler_of_ones_own(run):
    model = net()
    optimizer = _sgd(run, model)
    loader = run.loader(Numbered(53), sampler=Backwards(53))
    assert _train_numbered(run, model, optimizer, loader) == list(range(53))
    return run.finish(model)


@habit(exact=False, ways=RANKS)
def distributed_sampler(run):
    """As for DistributedDataParallel, with hpcdist's rank and size."""
    model, dataset = net(), Numbered(53)
    optimizer = _sgd(run, model)
    sampler = DistributedSampler(dataset, num_replicas=hd.size(), rank=hd.rank(), shuffle=True)
    loader = run.loader(dataset, sampler=sampler)
    orders = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        assert _train_numbered(run, model, optimizer, loader) == list(range(53))
        orders.append(loader._order.plan(1, loader._epoch).batch(0, 0).tolist())
    assert orders[0] != orders[1]
    return run.finish(model)


@habit(exact=False, ways=RANKS)
def shuffled(run):
    model = net()
    optimizer = _sgd(run, model)
    loader = run.loader(Numbered(53), shuffle=True)
    for _ in range(EPOCHS):
        assert _train_numbered(run, model, optimizer, loader) == list(range(53))
    return run.finish(model)


@habit(exact=False, ways=RANKS)
def random_sampler_of_fewer(run):
    model = net()
    optimizer = _sgd(run, model)
    loader = run.loader(Numbered(53), sampler=RandomSampler(range(53), num_samples=20))
    seen = _train_numbered(run, model, optimizer, loader)
    assert len(seen) == len(set(seen)) == 20
    run.same = tuple(seen)
    return run.finish(model)


@habit(exact=False, ways=RANKS)
def random_sampler_of_more(run):
    model = net()
    optimizer = _sgd(run, model)
    loader = run.loader(Numbered(20), sampler=RandomSampler(range(20), replacement=True, num_samples=47))
    seen = _train_numbered(run, model, optimizer, loader)
    assert len(seen) == 47
    run.same = tuple(seen)
    return run.finish(model)


@habit(exact=False, ways=RANKS)
def weighted_random_sampler(run):
    model = net()
    optimizer = _sgd(run, model)
    weights = [float(i % 2) for i in range(53)]
    loader = run.loader(Numbered(53), sampler=WeightedRandomSampler(weights, 30))
    seen = _train_numbered(run, model, optimizer, loader)
    assert len(seen) == 30 and all(n % 2 for n in seen)
    run.same = tuple(seen)
    return run.finish(model)


class Growing(Sampler):
    """Batches of 1, 2, 3... samples."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        start, size = 0, 1
        while start < self.n:
            yield list(range(start, min(start + size, self.n)))
            start, size = start + size, size + 1

    def __len__(self):
        return len(list(iter(self)))


@habit(exact=False, ways=RANKS)
def a_batch_sampler_of_ones_own(run):
    model, dataset = net(), Numbered(30)
    optimizer = _sgd(run, model, lr=0.02)
    loader = hd.shard(DataLoader(dataset, batch_sampler=Growing(30)))
    assert _train_numbered(run, model, optimizer, loader) == list(range(30))
    return run.finish(model)


@habit(exact=False, ways=RANKS)
def torchs_batch_sampler(run):
    model, dataset = net(), Numbered(53)
    optimizer = _sgd(run, model)
    loader = hd.shard(DataLoader(dataset, batch_sampler=BatchSampler(Backwards(53), 4, False)))
    assert _train_numbered(run, model, optimizer, loader) == list(range(53))
    return run.finish(model)


@habit(exact=False, ways=RANKS)
def single_samples(run):
    """batch_size=None."""
    model = net()
    optimizer = _sgd(run, model, lr=0.02)
    loader = run.loader(Numbered(20), batch=None)
    assert _train_numbered(run, model, optimizer, loader) == list(range(20))
    return run.finish(model)


@habit(ways=RANKS)
def drop_last(run):
    model = net()
    optimizer = _sgd(run, model)
    loader = run.loader(data(53), drop_last=True)
    train(run, model, optimizer, loader)
    return run.finish(model)


@habit(exact=False, ways=RANKS)
def a_worker_process(run):
    model = net()
    optimizer = _sgd(run, model)
    loader = run.loader(Numbered(20), num_workers=1)
    assert _train_numbered(run, model, optimizer, loader) == list(range(20))
    return run.finish(model)


class Stream(IterableDataset):
    def __init__(self, n: int, first: int = 0, step: int = 1):
        self.dataset, self.first, self.step = Numbered(n), first, step

    def __iter__(self):
        return (self.dataset[i] for i in range(self.first, len(self.dataset), self.step))


@habit(ways=RANKS)
def a_stream_that_knows_no_ranks(run):
    model = net()
    optimizer = _sgd(run, model)
    seen = _train_numbered(run, model, optimizer, run.loader(Stream(53)))
    assert seen == list(range(53))
    return run.finish(model)


@habit(exact=False, ways=RANKS)
def a_stream_split_by_rank(run):
    model = net()
    optimizer = _sgd(run, model)
    worker = run.rank - (run.size - run.workers)
    seen = _train_numbered(run, model, optimizer, run.loader(Stream(41, max(worker, 0), run.workers), batch=2))
    assert seen == list(range(41))
    return run.finish(model)


@habit(exact=False, ways=RANKS)
def own_loaders_of_different_lengths(run):
    model = net()
    optimizer = _sgd(run, model)
    loader = hd.shard(DataLoader(Numbered(5 + 9 * run.rank), batch_size=2), split=False)
    lengths = [5 + 9 * rank for rank in range(run.size)][run.size - run.workers :]
    assert len(_train_numbered(run, model, optimizer, loader)) == sum(lengths)
    return run.finish(model)


@habit(exact=False, ways=RANKS)
def own_loaders_one_of_which_is_empty(run):
    model = net()
    optimizer = _sgd(run, model)
    n = 0 if run.rank == run.size - 1 else 9
    loader = hd.shard(DataLoader(Stream(9) if n else Stream(9, 9), batch_size=2), split=False)
    assert len(_train_numbered(run, model, optimizer, loader)) == 9 * (run.workers - 1)
    return run.finish(model)


@habit()
def two_loaders_side_by_side(run):
    model = net()
    optimizer = _sgd(run, model)
    for _ in range(EPOCHS):
        for (x, y), (a, b) in zip(run.loader(data(48)), run.loader(data(60)), strict=False):
            optimizer.zero_grad()
            (mse(model(x), y) + mse(model(a), b)).backward()
            optimizer.step()
    return run.finish(model)


@habit()
def an_epoch_left_early(run):
    model = net()
    optimizer = _sgd(run, model)
    for _ in range(3):
        for i, (x, y) in enumerate(run.loader()):
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
            if i == 1:
                break
    return run.finish(model)


@habit(where=("allreduce", "gossip_sync", "gossip_pull", "dpsgd", "local_sgd", "strom"))
def an_endless_iterator(run):
    """As in loops that count steps."""
    model = net()
    optimizer = _sgd(run, model)
    loader = run.loader()

    def forever():
        while True:
            yield from loader

    batches = forever()
    for _ in range(7):
        x, y = next(batches)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    batches.close()
    return run.finish(model)


@habit(ways=("joint", "one", "same", "many"))
def evaluation_between_epochs(run):
    model = net()
    optimizer = _sgd(run, model)
    test, found = run.test(data(25)), []
    for _ in range(EPOCHS):
        model.train()
        train(run, model, optimizer, run.loader(), epochs=1)
        model.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for x, y in test:
                total, count = total + mse(model(x), y).item() * len(x), count + len(x)
        found.append(run.metric(total / max(count, 1), count))
    assert found[0] != found[1] or run.size > 1  # a centre without springs stays
    run.same = tuple(found)
    return run.finish(model)


@habit()
def evaluation_in_inference_mode(run):
    model = net()
    optimizer = _sgd(run, model)
    for _ in range(EPOCHS):
        train(run, model, optimizer, run.loader(), epochs=1)
        with torch.inference_mode():
            for x, y in run.test():
                mse(model(x), y)
    return run.finish(model)


@habit(ways=("joint",), where=("allreduce",), exact=False, breaks="a step is taken in an evaluation")
def trained_in_an_evaluation(run):
    model = net()
    optimizer = _sgd(run, model)
    train(run, model, optimizer, run.test(data(48)))
    return run.finish(model)


@habit(ways=("joint", "many"), exact=False, breaks="ranks are at different places in the loop")
def training_ended_by_one_rank(run):
    model = net()
    optimizer = _sgd(run, model)
    for epoch in range(3):
        train(run, model, optimizer, run.loader(), epochs=1)
        if epoch == 1 and run.rank == 1:
            break
    return run.finish(model)


OTHER_SAMPLES = r"loader must be the same on all workers, which share its samples; "


def _shard(run, dataset, batch=BATCH):
    loader = DataLoader(dataset, batch_size=batch)
    return hd.shard(loader) if run.size > 1 else loader


@habit(ways=("joint",), exact=False, refused={"*": OTHER_SAMPLES + "the checksum of Subset.indices is"})
def a_random_split_by_each_ranks_seed(run):
    model = net()
    optimizer = _sgd(run, model)
    part, _ = torch.utils.data.random_split(data(), [40, 12], torch.Generator().manual_seed(run.rank))
    train(run, model, optimizer, _shard(run, part))
    return run.finish(model)


@habit(ways=("joint",), exact=False, refused={"*": OTHER_SAMPLES + "the sum of the first rows of tensor 0 is"})
def samples_permuted_by_each_ranks_seed(run):
    model = net()
    optimizer = _sgd(run, model)
    x, y = data().tensors
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(run.rank))
    train(run, model, optimizer, _shard(run, TensorDataset(x[order], y[order])))
    return run.finish(model)


@habit(ways=("joint",), exact=False, refused={"*": OTHER_SAMPLES + "batch_size is"})
def another_batch_size_on_each_rank(run):
    model = net()
    optimizer = _sgd(run, model)
    train(run, model, optimizer, _shard(run, data(), BATCH + run.rank))
    return run.finish(model)


@habit(ways=("joint",))
def what_a_loader_has(run):
    model = net()
    optimizer = _sgd(run, model)
    loader = run.loader()
    assert len(loader.dataset) == 52 and loader.batch_size >= BATCH and loader.num_workers == 0
    assert not hasattr(loader, "nothing")
    train(run, model, optimizer, loader)
    return run.finish(model)


@habit()
def consensus_between_epochs(run):
    model = net()
    optimizer = _sgd(run, model)
    found = []
    for _ in range(EPOCHS):
        train(run, model, optimizer, run.loader(), epochs=1)
        with run.consensus(model), torch.no_grad():
            x, y = data(8).tensors
            found.append(mse(model(x), y).item())
    assert found[0] != found[1] or run.size > 1  # a centre without springs stays
    run.same = tuple(found)
    return run.finish(model)


@habit()
def figures_shared_in_the_loop(run):
    """allreduce, allgather, broadcast and metric in the body, where servers don't take part."""
    model = net()
    optimizer = _sgd(run, model)
    for _ in range(EPOCHS):
        for x, y in run.loader():
            optimizer.zero_grad()
            loss = mse(model(x), y)
            loss.backward()
            optimizer.step()
            if run.size > 1:
                assert len(hd.allgather([run.rank])) == run.workers
                assert hd.allreduce(1.0, "sum") == run.workers
                mean = hd.metric(loss.item())
                assert hd.broadcast(mean, run.size - 1) == mean
                hd.barrier()
    return run.finish(model)


@habit(ways=("one", "many"), where=("parameter_server", "softsync"), breaks="a rank that serves takes a step")
def a_plain_loader_on_a_rank_that_serves(run):
    model = net()
    optimizer = _sgd(run, model)
    train(run, model, optimizer, DataLoader(data(), batch_size=BATCH))
    return run.finish(model)


@habit(exact=False, ways=RANKS, breaks="a call of all ranks stands inside the loop")
def consensus_in_the_loop(run):
    model = net()
    optimizer = _sgd(run, model)
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(run.loader()):
            optimizer.zero_grad()
            mse(model(x), y).backward()
            optimizer.step()
            if i == 1:
                with run.consensus(model), torch.no_grad():
                    mse(model(x), y)
    return run.finish(model)


@habit(exact=False, ways=("one", "many"), where=groups.SERVED)
def rank_0_looks_at_its_own_model(run):
    """As Horovod's users do, between epochs. Where it serves it has what it serves."""
    model = net()
    optimizer = _sgd(run, model, lr=0.05)
    for _ in range(EPOCHS):
        train(run, model, optimizer, run.loader(), epochs=1)
        own = copied(model)
        with run.consensus(model):
            assert run.rank > 0 or difference(own, copied(model)) == 0.0
    return run.finish(model)
