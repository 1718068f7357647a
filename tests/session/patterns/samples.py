"""Loaders, samplers and what is asked of other ranks between batches."""

from __future__ import annotations

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

import hpcdist as hd
from patterns import groups
from patterns.run import BATCH, EPOCHS, copied, data, difference, mean_loss, mse, net, train, training

RANKS = ("joint", "many")


class Numbered(torch.utils.data.Dataset):
    """Samples with their numbers."""

    def __init__(self, n: int):
        self.tensors = data(n).tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int):
        return self.tensors[0][index], self.tensors[1][index], index


def _train_numbered(run, model, optimizer, loader) -> list[int]:
    """The plain loop; the numbers of the samples that counted, on all ranks together."""
    found: list[int] = []

    def batches():
        for x, y, index in loader:
            yield x, y
            if run.size == 1 or loader.weight:
                found.extend(torch.atleast_1d(torch.as_tensor(index)).tolist())

    train(run, model, optimizer, batches, 1)
    return sorted(found if run.size == 1 else (n for part in hd.allgather(found) for n in part))


def numbered(name, make, seen, *, shares=False, **given):
    """Puts a loop over the loader that `make(run)` makes into the table; `seen(samples)` must hold."""

    def loop(run, model, optimizer):
        torch.manual_seed(run.rank)  # ranks would draw differently
        found = _train_numbered(run, model, optimizer, make(run))
        assert seen(found) is not False, found
        if shares:
            run.same = tuple(found)

    loop.__name__ = name
    training(**{"exact": False, "ways": RANKS, **given})(loop)


def all_of(n):
    return lambda found: found == list(range(n))


class Backwards(Sampler):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n - 1, -1, -1))

    def __len__(self):
        return self.n


numbered("a_sampler_of_ones_own", lambda run: run.loader(Numbered(29), sampler=Backwards(29)), all_of(29), exact=True)


@training(exact=False, ways=RANKS)
def distributed_sampler(run, model, optimizer):
    """As for DistributedDataParallel, with hpcdist's rank and size."""
    dataset = Numbered(29)
    sampler = DistributedSampler(dataset, num_replicas=hd.size(), rank=hd.rank(), shuffle=True)
    loader = run.loader(dataset, sampler=sampler)
    orders = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        assert _train_numbered(run, model, optimizer, loader) == list(range(29))
        orders.append(loader._order.plan(1, loader._epoch).batch(0, 0).tolist())
    assert orders[0] != orders[1]


@training(exact=False, ways=RANKS)
def shuffled(run, model, optimizer):
    loader = run.loader(Numbered(29), shuffle=True)
    for _ in range(EPOCHS):
        assert _train_numbered(run, model, optimizer, loader) == list(range(29))


def _weighted(run):
    return run.loader(Numbered(29), sampler=WeightedRandomSampler([float(i % 2) for i in range(29)], 30))


def _more(run):
    return run.loader(Numbered(20), sampler=RandomSampler(range(20), replacement=True, num_samples=47))


numbered("random_sampler_of_more", _more, lambda found: len(found) == 47, shares=True)
numbered(
    "weighted_random_sampler", _weighted, lambda found: len(found) == 30 and all(n % 2 for n in found), shares=True
)


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


def _batches(n, batch_sampler):
    return lambda run: hd.shard(DataLoader(Numbered(n), batch_sampler=batch_sampler))


numbered("a_batch_sampler_of_ones_own", _batches(30, Growing(30)), all_of(30), lr=0.02)
numbered("torchs_batch_sampler", _batches(29, BatchSampler(Backwards(29), 4, False)), all_of(29))
numbered("single_samples", lambda run: run.loader(Numbered(20), batch=None), all_of(20), lr=0.02)
numbered("a_worker_process", lambda run: run.loader(Numbered(20), num_workers=1), all_of(20))


@training(ways=RANKS)
def drop_last(run, model, optimizer):
    train(run, model, optimizer, run.loader(data(29), drop_last=True))


class Stream(IterableDataset):
    def __init__(self, n: int, first: int = 0, step: int = 1):
        self.dataset, self.first, self.step = Numbered(n), first, step

    def __iter__(self):
        return (self.dataset[i] for i in range(self.first, len(self.dataset), self.step))


def worker(run) -> int:
    """The number of this rank among the workers; 0 on a server."""
    return max(run.rank - (run.size - run.workers), 0)


def _own(run, dataset):
    return hd.shard(DataLoader(dataset, batch_size=2), split=False)


class Batches(IterableDataset):
    """A stream of batches, as webdataset's WebLoader."""

    def __init__(self, dataset, batch):
        self.dataset, self.batch = dataset, batch

    def __iter__(self):
        return iter(DataLoader(self.dataset, batch_size=self.batch))


def _stream_of_batches(run):
    batches = Batches(Stream(29), BATCH * getattr(run, "joint", 1))
    return hd.shard(batches) if run.size > 1 else batches


numbered("a_stream_of_batches", _stream_of_batches, all_of(29), exact=True)
numbered("a_stream_that_knows_no_ranks", lambda run: run.loader(Stream(29)), all_of(29), exact=True)
numbered("a_stream_split_by_rank", lambda run: run.loader(Stream(41, worker(run), run.workers), batch=2), all_of(41))


@training(exact=False, ways=RANKS)
def own_loaders_of_different_lengths(run, model, optimizer):
    lengths = [5 + 9 * rank for rank in range(run.size)]
    found = _train_numbered(run, model, optimizer, _own(run, Numbered(lengths[run.rank])))
    assert len(found) == sum(lengths[run.size - run.workers :])


@training(exact=False, ways=RANKS)
def own_loaders_one_of_which_is_empty(run, model, optimizer):
    found = _train_numbered(run, model, optimizer, _own(run, Stream(9, 9 if run.rank == run.size - 1 else 0)))
    assert len(found) == 9 * (run.workers - 1)


@training()
def two_loaders_side_by_side(run, model, optimizer):
    def backward(one, other):
        (mse(model(one[0]), one[1]) + mse(model(other[0]), other[1])).backward()

    both = lambda: zip(run.loader(data(24)), run.loader(data(36)), strict=False)  # noqa: E731
    train(run, model, optimizer, both, backward=backward)


@training()
def an_epoch_left_early(run, model, optimizer):
    for _ in range(3):
        for i, batch in enumerate(run.loader()):
            train(run, model, optimizer, [batch], 1)
            if i == 1:
                break


@training(where=("allreduce", "gossip_sync", "gossip_pull", "dpsgd", "local_sgd", "strom"))
def an_endless_iterator(run, model, optimizer):
    """As in loops that count steps."""
    loader = run.loader()

    def forever():
        while True:
            yield from loader

    batches = forever()
    for _ in range(7):
        train(run, model, optimizer, [next(batches)], 1)
    batches.close()


@training(ways=("joint", "one", "same", "many"))
def evaluation_between_epochs(run, model, optimizer):
    test, found = run.test(data(25)), []
    for _ in range(EPOCHS):
        model.train()
        train(run, model, optimizer, run.loader(), epochs=1)
        model.eval()
        found.append(mean_loss(run, model, test))
    assert found[0] != found[1] or run.size > 1  # a centre without springs stays
    run.same = tuple(found)


@training()
def evaluation_in_inference_mode(run, model, optimizer):
    for _ in range(EPOCHS):
        train(run, model, optimizer, run.loader(), epochs=1)
        with torch.inference_mode():
            for x, y in run.test():
                mse(model(x), y)


def _normed():
    return net(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))


@training(0.01, model=_normed)
def update_bn_on_a_sharded_loader(run, model, optimizer):
    """Statistics are those of all samples, in batches of the script's size, on every rank."""
    model.eval()  # its batches would be others than one process's
    train(run, model, optimizer, run.loader())
    loader = DataLoader(data(), batch_size=BATCH)
    loader = hd.shard(loader) if run.size > 1 else loader
    run.finish(model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for each in (model, averaged):
        torch.optim.swa_utils.update_bn(loader, each)
    assert averaged.module[0].num_batches_tracked == 7
    return model


@training()
def evaluation_on_the_training_loader(run, model, optimizer):
    loader = run.loader()
    for _ in range(EPOCHS):
        train(run, model, optimizer, loader, epochs=1)
        with torch.no_grad():
            seen = sum(len(x) for x, y in loader)
        assert seen == len(loader.dataset)


@training(exact=False, ways=RANKS, breaks="a training loader is iterated for an evaluation")
def evaluation_on_the_training_loader_in_train_mode(run, model, optimizer):
    """Neither eval() nor no_grad()."""
    train(run, model, optimizer, run.loader())
    for x, y in run.loader():
        mse(model(x), y)


@training(exact=False)
def the_training_loader_gone_through_without_the_model(run, model, optimizer):
    """As to compute means of the data."""
    loader = run.loader()
    assert run.metric(sum(len(x) * loader.weight for x, y in loader) if run.size > 1 else 1.0) > 0
    train(run, model, optimizer, loader)


@training(0.01, model=_normed, exact=False, ways=RANKS, breaks="batch norm's statistics change in an evaluation")
def batch_norm_refreshed_by_hand_in_an_evaluation(run, model, optimizer):
    train(run, model, optimizer, run.loader())
    for x, _ in run.test():
        model(x)


@training(0.01, model=_normed)
def update_bn_on_an_evaluation_loader(run, model, optimizer):
    """Of the model and of an average of it; the latter on samples of each rank's own is refused."""
    model.eval()
    train(run, model, optimizer, run.loader())
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for each in (model, averaged):
        torch.optim.swa_utils.update_bn(run.test(), each)
    assert averaged.module[0].num_batches_tracked == 3
    run.same = averaged.module[0].running_mean.sum().item()


@training(0.01, model=_normed, ways=RANKS, exact=False, breaks="update_bn reads different samples on each rank")
def update_bn_of_an_average_on_samples_of_each_ranks_own(run, model, optimizer):
    """The model's own statistics are averaged at the end."""
    train(run, model.eval(), optimizer, run.loader())
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for each in (model, averaged):
        torch.optim.swa_utils.update_bn(hd.shard(DataLoader(data(), batch_size=BATCH), split=False), each)


@training(ways=("joint",), where=("allreduce",), exact=False, breaks="a step is taken in an evaluation")
def trained_in_an_evaluation(run, model, optimizer):
    train(run, model, optimizer, run.test(data(24)))


@training(ways=("joint", "many"), exact=False, breaks="ranks are at different places in the loop")
def training_ended_by_one_rank(run, model, optimizer):
    for epoch in range(3):
        train(run, model, optimizer, run.loader(), epochs=1)
        if epoch == 1 and run.rank == 1:
            break


@training(ways=("joint",))
def what_a_loader_has(run, model, optimizer):
    loader = run.loader()
    assert len(loader.dataset) == 28 and loader.batch_size >= BATCH and loader.num_workers == 0
    assert not hasattr(loader, "nothing")
    train(run, model, optimizer, loader)


@training()
def consensus_between_epochs(run, model, optimizer):
    found = []
    for _ in range(EPOCHS):
        train(run, model, optimizer, run.loader(), epochs=1)
        with run.consensus(model), torch.no_grad():
            x, y = data(8).tensors
            found.append(mse(model(x), y).item())
    assert found[0] != found[1] or run.size > 1  # a centre without springs stays
    run.same = tuple(found)


@training()
def figures_shared_in_the_loop(run, model, optimizer):
    """allreduce, allgather, broadcast and metric in the body, where servers don't take part."""

    def share():
        if run.size > 1:
            assert len(hd.allgather([run.rank])) == run.workers
            assert hd.allreduce(1.0, "sum") == run.workers
            mean = hd.metric(float(run.rank))
            assert hd.broadcast(mean, run.size - 1) == mean
            hd.barrier()

    train(run, model, optimizer, run.loader, after=share)


@training(
    distributed={"identical_batches": "allow"}, ways=("one", "many"),
    where=("parameter_server", "softsync"), breaks="a server rank takes a step",
)  # fmt: skip
def a_plain_loader_on_a_rank_that_serves(run, model, optimizer):
    train(run, model, optimizer, DataLoader(data(), batch_size=BATCH))


@training(exact=False, ways=RANKS, breaks="a collective call is inside the loop")
def consensus_in_the_loop(run, model, optimizer):
    def look():
        with run.consensus(model), torch.no_grad():
            mse(model(data(8).tensors[0]), data(8).tensors[1])

    train(run, model, optimizer, run.loader, after=look)


@training(0.05, exact=False, ways=("one", "many"), where=groups.SERVED)
def rank_0_looks_at_its_own_model(run, model, optimizer):
    """As Horovod's users do, between epochs. Where it serves it has what it serves."""
    for _ in range(EPOCHS):
        train(run, model, optimizer, run.loader(), epochs=1)
        own = copied(model)
        with run.consensus(model):
            assert run.rank > 0 or difference(own, copied(model)) == 0.0
