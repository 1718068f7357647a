"""What scripts written for Horovod do, compared with one process: a script of MPI's ranks, which imports Horovod.

Prints the name of each feature that does what it should. With names: these alone.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import allreduce_async, poll, synchronize
from torch import nn

from harness.features import OWN, STEPS, feature, network, require, run, samples, train


def raises(kind, message, call):
    try:
        call()
    except kind as error:
        require(message in str(error), error)
    else:
        raise AssertionError(f"it was taken, where {message!r} was to be said")


def same_as_alone(net):
    """As if one process had trained on all samples."""
    expected = network()
    train(expected, torch.optim.SGD(expected.parameters(), lr=0.1), inputs, targets)
    for one, other in zip(net.parameters(), expected.parameters()):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-3, atol=1e-4)


@feature
def calls_are_matched_by_name_in_any_order():
    names = [f"tensor {number}" for number in range(200)]
    order = names if rank == 0 else names[::-1]
    handles = {name: allreduce_async(torch.full((3,), float(names.index(name))), name=name) for name in order}
    for name in names:
        require(synchronize(handles[name]).tolist() == [float(names.index(name))] * 3)
    if rank == 0:  # waits for one after the other, which others do in another order
        first = hvd.allreduce(torch.ones(1), name="a")
        second = hvd.allreduce(torch.ones(1), name="b")
    else:
        handle = allreduce_async(torch.ones(1), name="b")
        first, second = hvd.allreduce(torch.ones(1), name="a"), synchronize(handle)
    require(first.item() == second.item() == 1.0)


@feature
def every_operation_and_dtype():
    own = torch.tensor([1 + rank, 2])
    for op, total in {
        hvd.Sum: [size * (size + 1) // 2, 2 * size],
        hvd.Min: [1, 2],
        hvd.Max: [size, 2],
        hvd.Average: [(size + 1) // 2, 2],
    }.items():
        for dtype in (torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16):
            if op != hvd.Average or not dtype.is_floating_point:
                require(hvd.allreduce(own.to(dtype), op=op).tolist() == total, op, dtype)
    for dtype, most in {torch.float16: 40_000, torch.int8: 100, torch.uint8: 200}.items():
        large = torch.full((size, 2), most).to(dtype)  # the sum is beyond the type's range, and the mean is not
        for mean in (hvd.allreduce(large), hvd.reducescatter(large)):
            require(mean.dtype == dtype and mean.unique().tolist() == [most], dtype)
    odd = torch.tensor([[1], [2]]).repeat_interleave(size, 0) * (rank + 1)  # averages and factors are rounded once
    thrice = [3 * each * size * (size + 1) // 2 // size for each in (1, 2)]
    require(hvd.allreduce(odd, postscale_factor=3.0)[::size, 0].tolist() == thrice)
    mean = hvd.reducescatter(odd, postscale_factor=3.0)
    require(mean.tolist() == [[thrice[(2 * rank + row) // size]] for row in range(2)] and mean.dtype == torch.int64)
    require(hvd.allreduce(torch.tensor([2.0]), op=hvd.Product).item() == 2.0**size)
    found = hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    require(found.tolist() == [2.0 * size] * 2)
    place = torch.ones(3)
    require(hvd.allreduce_(place, op=hvd.Sum) is place and place.tolist() == [size] * 3)
    several = hvd.grouped_allreduce([torch.ones(2), torch.full((3,), 2.0)], op=hvd.Sum)
    require([one.tolist() for one in several] == [[size] * 2, [2.0 * size] * 3])
    half = hvd.allreduce(torch.full((4,), 1.5), compression=hvd.Compression.fp16)
    require(half.dtype == torch.float32 and half.tolist() == [1.5] * 4)
    same = torch.full((4,), float(rank % 2 + 1))
    found = hvd.allreduce(same, op=hvd.Adasum)
    require(torch.allclose(found, torch.full((4,), 1.5)), found)  # parallel gradients: their mean


@feature
def parts_of_ranks():
    gathered = hvd.allgather(torch.full((rank + 1, 2), float(rank)))
    require(gathered[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)])
    require(hvd.broadcast(torch.tensor([rank]), root_rank=1).item() == 1)
    sent = torch.arange(float(size * (size + 1) // 2))
    splits = torch.arange(1, size + 1)
    found, received = hvd.alltoall(sent, splits)
    require(
        received.tolist() == [rank + 1] * size and len(found) == size * (rank + 1) and received.dtype == splits.dtype
    )
    found, received = hvd.synchronize(hvd.alltoall_async(torch.full((2 * size,), float(rank))))  # also without splits
    require(found.tolist() == [float(r) for r in range(size) for _ in range(2)] and received.tolist() == [2] * size)
    require(received.dtype == torch.int32)
    found = hvd.reducescatter(torch.ones(size + 1, 2), op=hvd.Sum)
    require(found.shape == (2 if rank == 0 else 1, 2) and found.unique().tolist() == [size])


@feature
def gradients_flow():
    own = torch.ones(3, requires_grad=True)
    hvd.allreduce(own, op=hvd.Sum).sum().backward()
    require(own.grad.tolist() == [size] * 3)
    for op in (hvd.Max, hvd.Min, hvd.Product, hvd.Adasum):  # the same call on gradients would give wrong ones
        result = hvd.allreduce(torch.full((2,), 1.0 + rank, requires_grad=True), op=op)
        raises(ValueError, "op of tensors with gradients must be Average or Sum", result.sum().backward)
    own = torch.ones(2, requires_grad=True)
    hvd.broadcast(own, 0).sum().backward()
    require(own.grad.tolist() == ([1.0] * 2 if rank == 0 else [0.0] * 2), own.grad)


@feature
def ranks_that_differ_are_told():
    raises(HorovodInternalError, f"on rank {size - 1}", lambda: hvd.allreduce(torch.ones(3 + rank)))
    raises(HorovodInternalError, "root rank", lambda: hvd.broadcast(torch.ones(1), root_rank=min(rank, 1)))
    raises(HorovodInternalError, "dtype", lambda: hvd.allgather(torch.ones(2, dtype=(torch.int, torch.long)[rank % 2])))
    require(hvd.allreduce(torch.ones(1)).item() == 1.0)
    handle = allreduce_async(torch.ones(1), name="twice") if rank == 0 else None
    if rank == 0:
        raises(ValueError, "must not be that of another one", lambda: allreduce_async(torch.ones(1), name="twice"))
    handle = handle if rank == 0 else allreduce_async(torch.ones(1), name="twice")
    while not poll(handle):
        time.sleep(0.001)
    synchronize(handle)
    kinds = (hvd.allreduce, hvd.allgather)
    text = "all ranks must make the same call under one name; got allreduce on rank 0; allgather on rank 1"
    raises(HorovodInternalError, text, lambda: kinds[rank % 2](torch.ones(1), name="kinds"))
    raises(ValueError, "op must be one of hvd's", lambda: hvd.allreduce(torch.ones(1), op="mean"))
    raises(ValueError, "average must not be given", lambda: hvd.allreduce(torch.ones(1), True, op=hvd.Sum))
    raises(ValueError, "rows must be divisible", lambda: hvd.alltoall(torch.ones(size + 1)))
    raises(ValueError, "splits must be an integer", lambda: hvd.alltoall(torch.ones(size), torch.ones(1)))
    raises(ValueError, "splits must add up to at most", lambda: hvd.alltoall(torch.ones(size), torch.full((size,), 9)))
    raises(ValueError, "root_rank must be a rank", lambda: hvd.broadcast(torch.ones(1), size))
    raises(ValueError, "must have a dimension", lambda: hvd.allgather(torch.tensor(1.0)))
    raises(ValueError, "that is scattered must have", lambda: hvd.reducescatter(torch.tensor(1.0)))
    raises(RuntimeError, "op of reducescatter", lambda: hvd.reducescatter(torch.ones(2), op=hvd.Max))
    sparse = torch.eye(2).to_sparse()
    raises(ValueError, "op of sparse tensors", lambda: hvd.sparse_allreduce_async(sparse, "s", hvd.Max))


@feature
def process_sets():
    even, odd = (hvd.add_process_set(range(start, size, 2)) for start in range(2))
    own = even if rank % 2 == 0 else odd
    found = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum, process_set=own)
    require(found.item() == sum(own.ranks) and own.included() and own.rank() == rank // 2)
    other = odd if own is even else even
    raises(ValueError, "must be in the process set", lambda: hvd.allreduce(torch.ones(1), process_set=other))
    raises(ValueError, "must have other ranks", lambda: hvd.add_process_set(range(0, size, 2)))
    raises(ValueError, "must be some of 0..", lambda: hvd.add_process_set([size]))
    hvd.barrier(process_set=own)
    require(hvd.remove_process_set(even) and hvd.remove_process_set(odd))
    raises(ValueError, "must be known to all ranks", own.size)
    require(not hvd.remove_process_set(hvd.global_process_set))


@feature
def ranks_that_have_joined_bring_zeros():
    for turn in range(rank + 1):
        here = sum(r >= turn for r in range(size))
        found = hvd.allreduce(torch.ones(2), op=hvd.Sum, name=f"turn {turn}")
        require(found.tolist() == [float(here)] * 2, turn, found)
    require(hvd.join() == size - 1)
    if rank == 0:
        hvd.join()
    else:
        raises(HorovodInternalError, "must not be called once a rank has joined", lambda: hvd.allgather(torch.ones(1)))
        hvd.join()


@feature
def optimizers():
    def check(passes=1, **options):
        net = network()
        options = {"named_parameters": net.named_parameters(), **options}
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), **options)
        require(isinstance(optimizer, torch.optim.SGD))
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        train(net, optimizer, inputs[mine], targets[mine], passes)
        same_as_alone(net)

    check()
    check(named_parameters=None)
    check(groups=2)
    check(gradient_predivide_factor=2.0)
    check(passes=2, backward_passes_per_step=2)
    check(compression=hvd.Compression.fp16)
    net = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1 + rank))
    net(inputs[mine]).sum().backward()
    raises(AssertionError, "zero_grad() was called after loss.backward()", optimizer.zero_grad)
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    require(optimizer.param_groups[0]["lr"] == 0.1)


@feature
def a_schedule_a_scaler_clipping_and_a_checkpoint():
    def loop(net, optimizer, x, y, synchronize, ahead):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for _ in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(net(x), y)).backward()
            synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            with ahead():
                scaler.step(optimizer)
            scaler.update()
            schedule.step()
            saved = pickle.dumps([net.state_dict(), optimizer.state_dict()])
            of_net, of_optimizer = pickle.loads(saved)
            net.load_state_dict(of_net)
            optimizer.load_state_dict(of_optimizer)
        return [one.detach() for one in net.parameters()]

    net, alone = network(), network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    found = loop(net, optimizer, inputs[mine], targets[mine], optimizer.synchronize, optimizer.skip_synchronize)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for one, other in zip(found, loop(alone, optimizer, inputs, targets, lambda: None, nullcontext), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@feature
def optimizers_refuse():
    net = network()
    sgd, params = torch.optim.SGD(net.parameters(), lr=0.1), list(net.parameters())
    wrong = {
        "should be a sequence of tuples": {"named_parameters": [params[0]]},
        "must be unique": {"named_parameters": [("a", one) for one in params]},
        "must name all parameters": {"named_parameters": [("a", params[0])]},
        "gradient_predivide_factor not supported": {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        "groups must be lists": {"groups": [["a"]]},
        "groups must not have a parameter twice": {"groups": [[params[0]], [params[0]]]},
        "groups must be at least 0": {"groups": -1},
    }
    for message, options in wrong.items():
        raises(ValueError, message, lambda options=options: hvd.DistributedOptimizer(sgd, **options))
    optimizer = hvd.DistributedOptimizer(sgd)
    net(inputs).sum().backward()
    raises(AssertionError, "more than backward_passes_per_step", lambda: net(inputs).sum().backward())
    optimizer.synchronize()
    lbfgs = torch.optim.LBFGS(net.parameters())
    raises(ValueError, "must not be LBFGS", lambda: hvd.broadcast_optimizer_state(lbfgs, 0))


@feature
def compressors_of_hpcdist():
    def trained(compression, **options):
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        options = {"named_parameters": net.named_parameters(), **options}
        train(net, hvd.DistributedOptimizer(optimizer, compression=compression, **options), inputs[mine], targets[mine])
        require(len({repr(one) for one in hvd.allgather_object([p.tolist() for p in net.parameters()])}) == 1)
        return net

    same_as_alone(trained(hvd.Compression.by("topk", ratio=1.0)))
    same_as_alone(trained(hvd.Compression.by("topk", ratio=1.0), groups=2))
    before = F.mse_loss(network()(inputs), targets)
    for name in ("topk", "powersgd", "qsgd", "onebit", "terngrad", "dgc", "threshold", "fp16"):
        require(F.mse_loss(trained(hvd.Compression.by(name))(inputs), targets) < before, name)
    few = hvd.Compression.by("topk", ratio=0.3)
    fusion_key, first = [network(), network(2)], trained(few)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in fusion_key]
    optimizers = [hvd.DistributedOptimizer(one, compression=few) for one in optimizers]
    for _ in range(STEPS):  # each has errors of its own, though their names are the same
        for net, optimizer in zip(fusion_key, optimizers, strict=True):
            optimizer.zero_grad()
            F.mse_loss(net(inputs[mine]), targets[mine]).backward()
            optimizer.step()
    require(all(map(torch.equal, fusion_key[0].parameters(), first.parameters())))
    every = hvd.Compression.by("topk", ratio=1.0)
    for options in ({}, {"sparse_as_dense": True}):
        table = nn.Embedding(10, 3, sparse=True)
        hvd.broadcast_parameters(table.state_dict(), 0)
        optimizer = torch.optim.SparseAdam(list(table.parameters()), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, compression=every, **options)
        table.weight.grad = None
        loss = table(torch.tensor([rank, 9])).sum()
        if not options:
            raises(ValueError, "gradients must be dense", loss.backward)
            continue
        loss.backward()
        optimizer.step()
        require(len({repr(one) for one in hvd.allgather_object(table.weight.tolist())}) == 1)
    net = network()
    raises(ValueError, "compression of single calls", lambda: hvd.allreduce(torch.ones(1), compression=few))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for message, options in {
        "op must be Average or Sum, without": {"op": hvd.Max},
        "groups must have all parameters": {"groups": [[next(net.parameters())]]},
    }.items():
        raises(ValueError, message, lambda o=options: hvd.DistributedOptimizer(sgd, compression=few, **o))


@feature
def sparse_gradients_in_a_group():
    tables = [nn.Embedding(10, 3, sparse=sparse) for sparse in (True, True, False)]
    nets = nn.ModuleList(tables)
    hvd.broadcast_parameters(nets.state_dict(), 0)
    before = [table.weight.detach().clone() for table in tables]
    optimizer = torch.optim.SGD(nets.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=nets.named_parameters(), groups=1)
    optimizer.zero_grad()
    torch.stack([table(torch.tensor([hvd.rank()])).sum() for table in tables]).sum().backward()
    optimizer.step()
    for table, weight in zip(tables, before):  # each rank has a row of its own: the mean moves each by 1 / size
        weight[: hvd.size()] -= 1 / hvd.size()
        require(torch.allclose(table.weight, weight))


@feature
def adasum_and_sparse_optimizers():
    net = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), op=hvd.Adasum)
    train(net, optimizer, inputs[mine], targets[mine])
    require(all(len({repr(one) for one in hvd.allgather_object(p.tolist())}) == 1 for p in net.parameters()))
    table = nn.Embedding(10, 3, sparse=True)
    hvd.broadcast_parameters(table.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(list(table.parameters()), lr=0.1))
    optimizer.zero_grad()
    table(torch.tensor([rank, 9])).sum().backward()
    optimizer.step()
    require(len({repr(one) for one in hvd.allgather_object(table.weight.tolist())}) == 1)


@feature
def layers_and_objects():
    require(hvd.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)])
    require(hvd.broadcast_object([rank], root_rank=1) == [1])
    for dtype in (torch.uint16, torch.uint64, torch.float8_e5m2):
        found = [*hvd.allgather_object([torch.ones(3).to(dtype)]), hvd.broadcast_object([torch.ones(3).to(dtype)], 0)]
        require(all(one.dtype == dtype and one.tolist() == [1, 1, 1] for (one,) in found))
    layer, plain = hvd.SyncBatchNorm(8), nn.BatchNorm1d(8)
    torch.testing.assert_close(layer(inputs[mine]), plain(inputs)[mine], rtol=1e-4, atol=1e-5)


@feature
def timelines():
    path = Path(tempfile.gettempdir(), f"timeline-{hvd.broadcast_object(time.time_ns(), 0)}.json")
    hvd.start_timeline(str(path), mark_cycles=True)
    hvd.allreduce(torch.ones(1), name="seen")
    hvd.stop_timeline()
    if rank == 0:
        events = json.loads(path.read_text())
        names = {event.get("name") for event in events}
        require({"CYCLE_START", "NEGOTIATE_ALLREDUCE", "ALLREDUCE", "process_name"} <= names, names)
    many = path.with_name(f"many-{path.name}")
    hvd.shutdown()
    os.environ["HOROVOD_TIMELINE"] = str(many)
    hvd.init()
    del os.environ["HOROVOD_TIMELINE"]
    for number in range(200):
        hvd.allreduce(torch.ones(1), name=f"seen {number}")
    hvd.shutdown()
    hvd.init()
    if rank == 0:
        counts = Counter(event.get("name") for event in json.loads(many.read_text()))
        require(counts["ALLREDUCE"] == counts["NEGOTIATE_ALLREDUCE"] == 200 and not counts["CYCLE_START"], counts)


@feature
def it_ends_and_begins_again():
    hvd.shutdown()
    require(not hvd.is_initialized())
    raises(ValueError, "use hvd.init()", hvd.rank)
    hvd.init()
    require(hvd.rank() == rank and hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size)
    require(hvd.local_size() * hvd.cross_size() == size and hvd.is_homogeneous() and hvd.mpi_threads_supported())


if __name__ == "__main__":
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Sparse invariant checks")
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    inputs, targets = samples(size)
    mine = slice(OWN * rank, OWN * (rank + 1))
    run(rank, hvd.barrier)
    hvd.shutdown()
