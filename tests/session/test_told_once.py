"""What a loop does that can't be known to be wrong: it is said, once, with what to write instead."""

from __future__ import annotations

import itertools
import logging
import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hpcdist as hd
from harness import loops
from hpcdist.comm.virtual import run_virtual
from hpcdist.errors import ConfigError, UnknownNameError
from hpcdist.model.flat import FlatModel

X = torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.INFO, "hpcdist")
    return lambda text: [record.levelname for record in caplog.records if text in record.getMessage()]


def _linear(comm, strategy="allreduce", model=None, **options):
    hd.init(comm=comm)
    model = model or nn.Linear(4, 1).double()
    return model, hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, strategy, **options)


# --- how many samples a batch has -------------------------------------------------------------------------------------
COUNTED = "Ranks' batches are weighted by their numbers of samples"


def _on_own_batches(sizes, make, loss, set_batch_weight=None):
    """One step on batches of these sizes, each rank's own; returns the parameters, and one process's."""
    cuts = np.cumsum([0, *sizes])

    def body(comm):
        torch.manual_seed(0)
        model, optimizer = _linear(comm)
        for batch in hd.shard([make(X[cuts[comm.rank] : cuts[comm.rank + 1]])], split=False):
            optimizer.zero_grad()
            if set_batch_weight:
                optimizer.set_batch_weight(set_batch_weight(batch))
            loss(model, batch).backward()
            optimizer.step()
        return model.weight.detach().clone()

    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    loss(model, make(X[: cuts[-1]])).backward()
    return run_virtual(body, len(sizes)), (model.weight - 0.1 * model.weight.grad).detach()


def _time_first(x):
    return x.expand(3, *x.shape)


CASES = {
    "samples first": (lambda x: x, lambda model, x: model(x).square().mean(), None, ["INFO"]),
    "graphs": (
        lambda x: SimpleNamespace(x=x.repeat(2, 1), num_graphs=len(x)),
        lambda model, b: model(b.x).square().sum() / 2 / b.num_graphs, None, ["INFO"],
    ),
    "an object": (lambda x: SimpleNamespace(x=x), lambda model, b: model(b.x).square().mean(), None, ["INFO"]),
    "packed": (
        lambda x: nn.utils.rnn.pack_sequence([row[None] for row in x]),
        lambda model, b: model(b.data).square().mean(), None, ["INFO"],
    ),
    "time first": (_time_first, lambda model, x: model(x[0]).square().mean(), None, ["WARNING"]),
    "time first, weighed": (_time_first, lambda model, x: model(x[0]).square().mean(), lambda x: x.shape[1], []),
    "different lengths": (
        lambda x: (torch.ones(2), x), lambda model, b: model(b[1]).square().mean(), None, ["WARNING"],
    ),
    "no tensor": (
        lambda x: x.tolist(), lambda model, b: model(torch.tensor(b).double()).square().mean(), None, ["WARNING"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_how_samples_were_counted_is_told_where_it_matters(told, case):
    make, loss, set_batch_weight, levels = CASES[case]
    found, alone = _on_own_batches((7, 3, 5), make, loss, set_batch_weight)
    assert told(COUNTED) == levels
    exact = torch.allclose(found[0], alone, rtol=0, atol=1e-12)
    assert exact == ("WARNING" not in levels)


def test_equal_batches_are_not_worth_a_word(told):
    found, alone = _on_own_batches((4, 4), lambda x: x, lambda model, x: model(x).square().mean())
    assert torch.allclose(found[0], alone, rtol=0, atol=1e-12)
    assert told(COUNTED) == []


# --- counts that ranks add up -----------------------------------------------------------------------------------------
WEIGHED = "the weight would count twice"


@pytest.mark.parametrize(
    ("how", "times"), [("all ranks' count", 1), ("own count", 0), ("weighed", 0), ("after the step", 0)]
)
def test_a_loss_over_the_count_of_all_ranks_in_an_uneven_step_is_named(told, how, times):
    def body(comm):
        torch.manual_seed(0)
        model, optimizer = _linear(comm)
        for x in hd.shard(DataLoader(X[:13], 4)):
            optimizer.zero_grad()
            count = float(len(x))
            if how == "all ranks' count":
                count = hd.allreduce(count)
            if how == "weighed":
                optimizer.set_batch_weight(count)
                hd.allreduce(count)
            (model(x).square().sum() / count).backward()
            optimizer.step()
            if how == "after the step":
                hd.allreduce(count)

    run_virtual(body, 3)
    assert told(WEIGHED) == ["WARNING"] * times


# --- random numbers ---------------------------------------------------------------------------------------------------
class Noise(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.rand(1, dtype=torch.float64).item(), np.random.random(), random.random()


@pytest.mark.parametrize("split", [True, False])
def test_processes_of_loaders_draw_other_numbers_on_each_rank_of_one_seed(split):
    def body(comm):
        _linear(comm)
        torch.manual_seed(0)
        loader = DataLoader(Noise(), 2, num_workers=2, collate_fn=lambda batch: torch.tensor(batch))
        epochs = [[batch for batch in hd.shard(loader, split=split)] for _ in range(2)]
        return epochs, torch.rand(1)

    torch.manual_seed(0)
    alone = [list(DataLoader(Noise(), 2, num_workers=2, collate_fn=torch.tensor)) for _ in range(2)]
    after = torch.rand(1)
    ranks = run_virtual(body, 3)
    drawn = [tuple(batch.flatten().tolist()) for epochs, _ in ranks for epoch in epochs for batch in epoch]
    assert len({number for numbers in drawn for number in numbers}) == sum(map(len, drawn))
    assert all(rest == after for _, rest in ranks)  # what follows is drawn alike
    for own, plain in zip(ranks[0][0], alone, strict=True):
        assert all(torch.equal(*pair) for pair in zip(own, plain))  # the first worker's are one process's


MASKS = "their dropout masks are identical"


@pytest.mark.parametrize(
    ("layer", "seed", "levels"),
    [
        (nn.Dropout(0.5), lambda rank: 0, ["INFO"]), (nn.Dropout(0.5), lambda rank: rank, []),
        (nn.Dropout(0.0), lambda rank: 0, []), (nn.Tanh(), lambda rank: 0, []),
    ],
)  # fmt: skip
def test_equal_masks_of_dropout_are_told(told, layer, seed, levels):
    def body(comm):
        torch.manual_seed(seed(comm.rank))
        model, optimizer = _linear(comm, "gossip_sync", nn.Sequential(layer, nn.Linear(4, 1)).double())
        for _ in range(2):
            loops.steps(optimizer, hd.shard(DataLoader(X, 4)), lambda x: model(x).square().mean().backward())

    run_virtual(body, 2)
    assert told(MASKS) == levels


# --- buffers ----------------------------------------------------------------------------------------------------------
BUFFERS = "Ranks have changed buffers differently"


class Queue(nn.Module):
    """Keeps the last keys, of length 1, and where they end; with batch norm beside them."""

    def __init__(self, count=12):
        super().__init__()
        self.net, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.register_buffer("queue", torch.eye(3).repeat(count // 3, 1))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        keys = nn.functional.normalize(self.norm(self.net(x)), dim=1)
        at = int(self.place)
        self.queue[at : at + len(x)] = keys.detach()
        self.place[0] = (at + len(x)) % len(self.queue)
        return (keys @ self.queue.clone().T).square().mean()


def _queues(strategy, size, buffers=None, steps=3, **options):
    def body(comm):
        torch.manual_seed(0)
        model, optimizer = _linear(comm, strategy, Queue().double(), buffers=buffers, **options)
        seen = []
        note = lambda x=None: seen.append({name: buffer.clone() for name, buffer in model.named_buffers()})  # noqa: E731
        batches = hd.shard(DataLoader(X[: 4 * size * steps], 4))
        loops.steps(optimizer, batches, lambda x: model(x).backward(), after=note)
        with hd.consensus(model):
            note()
        hd.finish(model)
        note()
        return seen

    return run_virtual(body, size)


@pytest.mark.parametrize("strategy", ["allreduce", "gossip_sync", "local_sgd"])
def test_a_queue_is_the_first_ranks_and_statistics_are_means(told, strategy):
    ranks = _queues(strategy, 3)
    last = [seen[-3] for seen in ranks]
    for seen in ranks:
        for state in seen[-2:]:  # the consensus, and what is left
            assert torch.equal(state["queue"], last[0]["queue"]) and torch.equal(state["place"], last[0]["place"])
            assert torch.allclose(state["queue"].norm(dim=1), torch.ones(12).double())
            means = torch.stack([state["norm.running_mean"] for state in last]).mean(0)
            assert torch.allclose(state["norm.running_mean"], means, rtol=0, atol=1e-12)
    assert torch.equal(last[0]["queue"], last[1]["queue"]) == (strategy == "allreduce")
    assert told(BUFFERS) == ["WARNING"]


def test_a_queue_may_be_each_ranks_own_or_the_mean_by_its_name(told):
    own, ranks = (_queues("allreduce", 2, buffers={name: kind}) for name, kind in (("que*", "own"), ("queue", "mean")))
    assert not torch.equal(own[0][2]["queue"], own[1][2]["queue"])
    assert torch.equal(own[1][-1]["queue"], own[0][2]["queue"])
    means = (own[0][0]["queue"] + own[1][0]["queue"]) / 2
    assert all(torch.allclose(seen[0]["queue"], means, rtol=0, atol=1e-12) for seen in ranks)
    assert told(BUFFERS) == []


def test_a_queue_to_which_all_ranks_add_the_same_is_not_worth_a_word(told):
    class Joined(Queue):
        def forward(self, x):
            return super().forward(hd.allgather(x) if self.training else x)

    def body(comm):
        model, optimizer = _linear(comm, model=Joined(24).double(), identical_batches="allow")
        loops.steps(optimizer, hd.shard(DataLoader(X, 4)), lambda x: model(x).backward())
        return model.queue.clone()

    one, other = run_virtual(body, 2)
    assert torch.equal(one, other)
    assert told(BUFFERS) == []


@pytest.mark.parametrize(
    ("buffers", "error", "message"),
    [
        ({"queue": "sum"}, UnknownNameError, r"buffers\['queue'\] must be one of first, mean, own; got 'sum'"),
        ({"nothing": "own"}, UnknownNameError, "buffers must be one of .*queue; got 'nothing'"),
        ({"place": "mean"}, ConfigError, r"buffers\['place'\] must be first or own for torch.int64; got mean"),
    ],
)
def test_kinds_of_buffers_that_can_t_be(buffers, error, message):
    with pytest.raises(error, match=message):
        FlatModel(Queue(), buffers=buffers)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_the_kinds_that_buffers_have_by_themselves():
    model = nn.ModuleDict({"a": Queue(), "b": nn.InstanceNorm1d(3, track_running_stats=True)})
    flat = FlatModel(model).flat_buffers
    kinds = {slot.name: flat.kinds[slot.group] for slot in flat.slots}
    assert kinds == {
        "a.queue": "first", "a.place": "first", "a.norm.running_mean": "mean", "a.norm.running_var": "mean",
        "a.norm.num_batches_tracked": "count", "b.running_mean": "mean", "b.running_var": "mean",
        "b.num_batches_tracked": "count",
    }  # fmt: skip
    scripted = FlatModel(torch.jit.script(nn.Sequential(nn.BatchNorm1d(3)))).flat_buffers
    assert sorted(scripted.kinds) == ["count", "mean"]


# --- batches that a loop keeps ----------------------------------------------------------------------------------------
def _on_kept_batches(samples, kept, set_batch_weight=False):
    def body(comm):
        _, optimizer = _linear(comm)
        for x in kept(hd.shard(DataLoader(X[:samples], batch_size=4))):
            if set_batch_weight:
                optimizer.set_batch_weight(len(x))
            optimizer.zero_grad()
            optimizer.strategy.model.module(x).square().mean().backward()
            optimizer.step()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run_virtual(body, 2)
    return [str(each.message) for each in found if "kept batches" in str(each.message)]


def test_steps_on_batches_of_other_sizes_that_the_loop_has_kept_are_warned_of():
    cycled = lambda loader: itertools.islice(itertools.cycle(loader), 6)  # noqa: E731
    assert _on_kept_batches(20, cycled)
    assert _on_kept_batches(20, list)
    assert not _on_kept_batches(24, cycled)  # all batches are as large
    assert not _on_kept_batches(20, iter)
    assert not _on_kept_batches(20, cycled, set_batch_weight=True)
