"""What ranks tell each other in the user's own loop: types stay, means are the default, servers are left in peace."""

from __future__ import annotations

import math
from collections import namedtuple

import numpy as np
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
            with pytest.raises(ConfigError, match="an evaluation must be outside of the training loop if there"):
                with hd.consensus(model):
                    pass
        everyone = hd.allreduce(comm.rank, "sum")
        hd.finish(model)
        return found, everyone

    server, *workers = ranks(body)
    assert server == ([], 3)
    assert all(worker == ([(3, 1.5, [1, 2])] * 2, 3) for worker in workers)


LENGTHS = (1, 16, 63, 64, 67, 1000)
SHORT = {torch.int8: 100, torch.uint8: 200, torch.int16: 30_000, torch.uint16: 60_000}


@pytest.mark.sizes(1, 3)
def test_sums_of_short_integers_wrap_around_as_torch_adds_at_every_length(ranks):
    def body(comm):
        hd.init(comm=comm)
        for dtype, value in SHORT.items():
            for count in LENGTHS:
                own = torch.full((count,), value).to(dtype)
                total, directly = torch.full((count,), value * comm.size).to(dtype), own.clone()
                comm.allreduce(directly)
                assert torch.equal(directly.long(), total.long()), (dtype, count)
                found = hd.allreduce(own, "sum")
                assert found.dtype is dtype and torch.equal(found.long(), total.long()), (dtype, count)
                mine = torch.full((count,), value - comm.rank).to(dtype)
                assert set(hd.allreduce(mine, "min").tolist()) == {value - comm.size + 1}
                assert set(hd.allreduce(mine, "max").tolist()) == {value}
        return True

    assert all(ranks(body))


@pytest.mark.sizes(1, 3)
def test_numbers_are_combined_exactly_and_keep_their_kind(ranks):
    def body(comm):
        hd.init(comm=comm)
        last = comm.rank == comm.size - 1
        with pytest.raises(ConfigError, match=r"the max of integers must be within int64, .*; got 9223372036854775808"):
            hd.allreduce(2**63, "max")
        with pytest.raises(ConfigError, match=r"the sum of integers must be within int64"):
            hd.allreduce(2**63 // comm.size + 1, "sum")
        with pytest.raises(ConfigError, match="value must be a tensor, a NumPy array, .*; got NoneType. Use allgather"):
            hd.allreduce(None)
        found = [
            hd.allreduce(2**60 + comm.rank, "max"), hd.allreduce(-(2**63) + comm.rank, "min"),
            hd.allreduce(2**53 + 1, "sum"), hd.allreduce(2**62), hd.allreduce(np.int64(2**60 + 1), "max"),
            hd.allreduce(np.uint8(200), "sum"), hd.allreduce(np.float32(0.5)), hd.allreduce(last, "max"),
            hd.allreduce(0.5 if last else 0, "sum"),  # an integer where a rank has no batch
            hd.allreduce(math.nan if last else 1.0, "max"),
        ]  # fmt: skip
        return [(type(one), repr(one)) for one in found]

    for found in (results := ranks(body)):
        size = len(results)
        expected = [2**60 + size - 1, -(2**63), size * (2**53 + 1), 2.0**62, 2**60 + 1, 200 * size, 0.5, True, 0.5]
        assert found == [(type(one), repr(one)) for one in [*expected, math.nan]]


@pytest.mark.sizes(1, 3)
def test_the_mean_of_half_precision_is_made_in_float32_and_rounded_once(ranks):
    def body(comm):
        hd.init(comm=comm)
        for dtype in (torch.float16, torch.bfloat16, torch.float8_e5m2):
            own = [torch.linspace(0.1, 4e4, 67).roll(rank).to(dtype) for rank in range(comm.size)]
            mean = (torch.stack([one.float() for one in own]).sum(dim=0) / comm.size).to(dtype)
            assert torch.equal(hd.allreduce(own[comm.rank]).float(), mean.float()), dtype
        return hd.allreduce(torch.tensor([40_000.0, -60_000.0], dtype=torch.float16)).tolist()

    assert all(found == [40_000, -60_000] for found in ranks(body))


Metrics = namedtuple("Metrics", "loss accuracy")
RARE = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32, torch.bool]


@pytest.mark.sizes(1, 3)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_and_container_goes_through_all_calls(ranks):
    def body(comm):
        hd.init(comm=comm)
        for dtype in RARE:
            own = torch.tensor([comm.rank % 2, 1, 0]).to(dtype)
            wide = own.to(torch.complex64 if dtype.is_complex else torch.float64)
            assert torch.equal(hd.allgather(own).to(wide.dtype), hd.allgather(wide)), dtype
            told = hd.broadcast({"of": [own[:2]], 1: "x"}, root=comm.size - 1)["of"][0]
            assert torch.equal(told.to(wide.dtype), hd.broadcast([1, wide[:2]], root=comm.size - 1)[1]), dtype
            for op in ("min", "max") if not dtype.is_complex else ():
                assert torch.equal(hd.allreduce(own, op).to(wide.dtype), hd.allreduce(wide, op)), (dtype, op)
        with pytest.raises(ConfigError, match="operation 'min' must have numbers that have an order; got torch"):
            hd.allreduce(torch.ones(2, dtype=torch.complex64), "min")
        if comm.size > 1:
            with pytest.raises(MismatchError, match=r"got a number on rank 0 and torch.float32 \(2,\) on rank 1"):
                hd.allreduce(1.0 if comm.rank == 0 else torch.ones(2))
        conjugated = hd.allreduce(torch.tensor([1 + 2j, 3 - 1j]).conj(), "sum").tolist()
        sparse = hd.allreduce(torch.eye(2).to_sparse(), "sum")
        turned = hd.allreduce(torch.arange(6.0).view(2, 3).T, "sum").tolist()
        array = hd.allreduce(np.arange(3.0)[::-1], "sum")
        empty = hd.allreduce(torch.zeros(0, 3), "max").shape
        return hd.allreduce(Metrics(1.0, (comm.rank,))), conjugated, sparse, turned, array, empty

    for metrics, conjugated, sparse, turned, array, empty in (found := ranks(body)):
        size = len(found)
        assert metrics == Metrics(1.0, ((size - 1) / 2,)) and type(metrics) is Metrics
        assert conjugated == [size * (1 - 2j), size * (3 + 1j)] and empty == (0, 3)
        assert sparse.is_sparse and torch.equal(sparse.to_dense(), size * torch.eye(2))
        assert turned == (size * torch.arange(6.0).view(2, 3).T).tolist()
        assert isinstance(array, np.ndarray) and array.tolist() == [2.0 * size, size, 0.0]


@pytest.mark.sizes(2)
@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_are_gathered_and_broadcast(ranks, layout):
    def body(comm):
        hd.init(comm=comm)
        own = (torch.eye(3) * (comm.rank + 1)).to_sparse(layout=layout)
        joined, told = hd.allgather(own), hd.broadcast(own, root=1)
        return joined.layout is layout and told is own, joined.to_dense(), own.to_dense()

    for kept, joined, told in ranks(body):
        assert kept and torch.equal(told, 2 * torch.eye(3))
        assert torch.equal(joined, torch.cat([torch.eye(3), 2 * torch.eye(3)]))
