"""All workers train on the same batches, because nothing shares the samples out and there is one seed: warned of."""

from __future__ import annotations

import warnings

import pytest
import torch
from patterns.run import data, mse, net
from torch.optim import LBFGS, SGD
from torch.utils.data import DataLoader

import hpcdist as hd
from harness.cases import each
from harness.ranks import VirtualRanks
from hpcdist.strategies import Contract, Strategy
from strategies import problem

RANKS = 3


def told(body, ranks=None):
    """The warnings of a loop on ranks."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        (ranks or VirtualRanks(RANKS))(body)
    return [str(warning.message) for warning in found if "same batches" in str(warning.message)]


def loop(strategy, *, batches=None, loss=mse, own=lambda rank: data(12), **options):
    """Trains on batches that each rank draws by itself; `own(rank)` are its samples."""

    def body(comm):
        hd.init(comm=comm)
        model = net()
        local = problem.local(strategy, model.parameters(), lr=0.01)
        optimizer = hd.DistributedOptimizer(local, model, strategy=strategy, **options)
        loader = DataLoader(own(comm.rank), batch_size=4)
        for _ in range(2):
            for x, y in batches(loader) if batches else loader:
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
        hd.finish(model)

    return body


def split(loader):
    return hd.shard(loader, split=False)


@each("strategy", problem.stepping())
def test_one_rank_warns_once_with_every_strategy(strategy):
    (message,) = told(loop(strategy, batches=split, **problem.fitting(strategy, RANKS)))
    assert (
        "loader = hpcdist.shard(loader)" in message and "another seed on each rank (seed + hpcdist.rank())" in message
    )


def _constant(rank):
    return torch.utils.data.TensorDataset(torch.ones(12, 5).double(), torch.ones(12, 1).double())


# By what is not the same, or is meant so.
SILENT = {
    "samples of its own": {"own": lambda rank: torch.utils.data.Subset(data(36), range(12 * rank, 12 * rank + 12))},
    "samples that are shared out, if equal": {"own": _constant, "batches": hd.shard},
    "allowed": {"identical_batches": "allow"},
    "no gradient": {"loss": lambda output, y: 0.0 * mse(output, y)},
}


@pytest.mark.parametrize("case", SILENT)
@each("strategy", ["allreduce", "hardsync", "gossip_pull", "local_sgd"])
def test_nothing_is_said_where_batches_differ_or_it_is_meant(case, strategy):
    assert told(loop(strategy, **{"batches": split, **SILENT[case]})) == []


@each("options", [{"overlap": "on"}, {"overlap": "off"}, {"compression": "fp16"}])
def test_gradients_are_compared_before_they_are_averaged(options):
    assert len(told(loop("allreduce", **options))) == 1
    assert told(loop("allreduce", **SILENT["samples of its own"], **options)) == []


class ByHand(Strategy):
    """Averages gradients in place before anything of the library reads them."""

    contract = Contract(averages="gradients", synchronizes="every step")

    def advance(self, update):
        for grads in self.model.grads:
            self.comm.allreduce(grads)
        return self.gradients.step_alone(update)


def test_gradients_that_a_users_strategy_averages_in_place_are_compared_before():
    by_hand = f"{__file__}:ByHand"
    assert len(told(loop(by_hand, batches=split))) == 1
    assert told(loop(by_hand, **SILENT["samples of its own"])) == []


def test_two_optimizers_and_lbfgs_warn_once():
    def body(comm):
        hd.init(comm=comm)
        model = net()
        made = [hd.DistributedOptimizer(SGD(part.parameters(), lr=0.01), model) for part in (model[0], model[2])]
        for x, y in DataLoader(data(12), batch_size=4):
            mse(model(x), y).backward()
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad()
        hd.finish(model)

    def lbfgs(comm):
        hd.init(comm=comm)
        model = net()
        optimizer = hd.DistributedOptimizer(LBFGS(model.parameters(), max_iter=2), model)

        def evaluate():
            optimizer.zero_grad()
            loss = mse(model(data(8).tensors[0]), data(8).tensors[1])
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(evaluate)
        hd.finish(model)

    assert [len(told(each_body)) for each_body in (body, lbfgs)] == [1, 1]


@each("strategy", ["allreduce", "gossip_pull"])
def test_one_rank_alone_is_told_nothing(strategy):
    assert told(loop(strategy), VirtualRanks(1)) == []


@pytest.mark.mpi(min_size=2)
def test_the_first_of_real_ranks_is_told(ranks):
    def counted(comm):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            loop("allreduce", overlap="on")(comm)
        return len(found)

    assert ranks(counted) == [1] + [0] * (ranks.size - 1)
