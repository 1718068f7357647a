"""What ranks tell each other in the user's own loop: types stay, means are the default, servers are left in peace."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hpcdist as hd
from hpcdist.errors import ConfigError, MismatchError, UnknownNameError


@pytest.mark.sizes(1, 3)
def test_allreduce_keeps_types_and_averages(ranks):
    def body(comm):
        hd.init(comm=comm)
        rank = float(comm.rank)
        value = {"loss": rank, "seen": comm.rank, "grad": torch.full((2, 3), rank), "pair": [rank, (2 * rank,)]}
        return hd.allreduce(value), hd.allreduce(value, "sum"), hd.allreduce(value, "max"), hd.allreduce(value, "min")

    found = ranks(body)
    size = len(found)
    mean = (size - 1) / 2
    for average, total, most, least in found:
        assert average["loss"] == mean and average["seen"] == mean
        assert torch.equal(average["grad"], torch.full((2, 3), mean)) and average["pair"] == [mean, (2 * mean,)]
        assert (total["seen"], type(total["seen"])) == (size * (size - 1) // 2, int)
        assert (most["loss"], most["pair"], least["seen"]) == (size - 1, [size - 1, (2 * (size - 1),)], 0)
        assert torch.equal(most["grad"], torch.full((2, 3), size - 1.0))


@pytest.mark.sizes(2)
def test_allreduce_of_integers_and_complex_numbers(ranks):
    def body(comm):
        hd.init(comm=comm)
        with pytest.raises(ConfigError, match="op must be sum, min or max for a tensor of torch.int64"):
            hd.allreduce(torch.tensor([1, 2]))
        with pytest.raises(UnknownNameError, match="op must be one of .*mean.*; got 'avarage'"):
            hd.allreduce(1.0, op="avarage")
        complex_sum = hd.allreduce(torch.tensor([1j * comm.rank + 1]), "sum")
        with pytest.raises(MismatchError, match=r"value must have the same shape on every rank; got .*\(1,\) on rank"):
            hd.allreduce(torch.ones(1 + comm.rank))
        return hd.allreduce(torch.tensor([comm.rank + 1]), "sum"), complex_sum

    for integers, complexes in ranks(body):
        assert integers.tolist() == [3] and integers.dtype is torch.int64 and complexes.tolist() == [2 + 1j]


@pytest.mark.sizes(1, 3)
def test_allgather_joins_tensors_and_lists_the_rest(ranks):
    def body(comm):
        hd.init(comm=comm)
        hd.barrier()
        rows = torch.full((comm.rank + 1, 2), comm.rank)
        return hd.allgather({"rows": rows, "one": torch.tensor(comm.rank), "name": str(comm.rank)}), hd.local_size()

    found = ranks(body)
    for gathered, local in found:
        assert gathered["rows"].tolist() == [[rank] * 2 for rank in range(len(found)) for _ in range(rank + 1)]
        assert gathered["one"].tolist() == list(range(len(found))) and gathered["name"] == [
            str(rank) for rank in range(len(found))
        ]
        assert 1 <= local <= len(found)


@pytest.mark.sizes(1, 3)
def test_broadcast_keeps_types(ranks):
    def body(comm):
        hd.init(comm=comm)
        return hd.broadcast({"range": (1, comm.rank), 7: None, "set": {comm.rank}, "inf": math.inf}, root=comm.size - 1)

    found = ranks(body)
    last = len(found) - 1
    assert all(value == {"range": (1, last), 7: None, "set": {last}, "inf": math.inf} for value in found)


@pytest.mark.sizes(1, 3)
def test_a_metric_is_the_mean_over_samples_of_all_ranks(ranks):
    def body(comm):
        hd.init(comm=comm)
        mean = hd.metric({"loss": float(comm.rank), "of none": math.nan}, weight=comm.rank)
        return mean["loss"], hd.metric(torch.tensor(2.0)), hd.metric(math.nan, weight=0)

    found = ranks(body)
    for loss, two, none in found:
        size = len(found)
        expected = sum(r * r for r in range(size)) / sum(range(size)) if size > 1 else math.nan
        assert loss == pytest.approx(expected, nan_ok=True) and two == 2.0 and math.isnan(none)


@pytest.mark.parametrize("name", ["hardsync", "parameter_server"])
@pytest.mark.sizes(3)
def test_inside_a_loop_with_servers_the_workers_speak_among_themselves(ranks, name):
    def body(comm):
        hd.init(comm=comm)
        model = torch.nn.Linear(1, 1)
        optimizer = hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, strategy=name)
        x, found = torch.ones(8, 1), []
        for (batch,) in hd.shard(DataLoader(TensorDataset(x), batch_size=2)):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            found.append((hd.allreduce(comm.rank, "sum"), hd.metric(comm.rank), hd.allgather(comm.rank)))
            assert hd.broadcast(comm.rank, root=2) == 2
            with pytest.raises(ConfigError, match="root must be a worker inside the training loop.*; got 0. Use 1"):
                hd.broadcast(1, root=0)
            with pytest.raises(ConfigError, match="an evaluation must be outside of the training loop where ranks"):
                with hd.consensus(model):
                    pass
        everyone = hd.allreduce(comm.rank, "sum")
        hd.finish(model)
        return found, everyone

    server, *workers = ranks(body)
    assert server == ([], 3)
    assert all(worker == ([(3, 1.5, [1, 2])] * 2, 3) for worker in workers)
