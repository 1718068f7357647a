"""What stands on torch.distributed, on the backend hpcdist, compared with one process: a script of MPI's ranks.

Prints the name of each feature that does what it should. With names: these alone.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import tempfile
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hpcdist.torch_backend
from harness.features import OWN, STEPS, feature, network, require, run, samples, train
from hpcdist.comm.work import RELEASED
from hpcdist.registry import catalogue
from hpcdist.torch_backend.group import BARRIER_TAG
from hpcdist.torch_backend.hooks import CompressionState, compressed


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def alone(make=sgd):
    """Train on all samples in one process."""
    net = network()
    train(net, make(net.parameters()), inputs, targets)
    return net.parameters()


def same(found, expected, tolerance=1e-5):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=tolerance, atol=tolerance)


@feature
def ddp():
    small = {"bucket_cap_mb": 0.0005}
    for options in (
        {},
        small,
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"broadcast_buffers": False, "check_reduction": True, "process_group": dist.new_group(list(range(size)))},
        {"device_mesh": init_device_mesh("cpu", (size,))},
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
        {"bucket_cap_mb_list": [1, 2]},
        {"batched_grad_copy": True},
    ):
        if options.keys() <= inspect.signature(DistributedDataParallel).parameters.keys():  # not all torches have all
            net = DistributedDataParallel(network(), **options)
            train(net, sgd(net.parameters()), inputs[mine], targets[mine])
            same(net.parameters(), alone())
    net = DistributedDataParallel(network() if rank == 0 else network(2), init_sync=True)
    train(net, sgd(net.parameters()), inputs[mine], targets[mine])
    same(net.parameters(), alone())


@feature
def ddp_accumulates_without_sync():
    net = DistributedDataParallel(network())
    optimizer = sgd(net.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        with net.no_sync():
            (F.mse_loss(net(inputs[mine][:4]), targets[mine][:4]) / 2).backward()
        (F.mse_loss(net(inputs[mine][4:]), targets[mine][4:]) / 2).backward()
        optimizer.step()
    same(net.parameters(), alone())


@feature
def ddp_buffers_and_join():
    net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
    with net.join():
        for _ in range(rank + 2):  # uneven inputs
            net(inputs[mine]).sum().backward()
    everyone = [torch.empty(4) for _ in range(size)]
    dist.all_gather(everyone, net.module[0].bias.grad)
    same(everyone[1:], everyone[:1] * (size - 1))


@feature
def ddp_joins_with_either_divisor_and_with_hooks():
    hooks = {None: 0.0, default_hooks.allreduce_hook: 0.0, default_hooks.fp16_compress_hook: 1e-2}
    for (hook, tolerance), by_all in itertools.product(hooks.items(), (True, False)):
        net = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        if hook is not None:
            net.register_comm_hook(None, hook)
        with net.join(divide_by_initial_world_size=by_all):
            for step in range(rank + 1):  # rank r brings gradients of r + 1, in r + 1 steps
                net.zero_grad()
                net(torch.full((1, 1), rank + 1.0)).sum().backward()
                here = range(step, size)
                # Hooks divide by the number of the group's ranks themselves.
                divisor = size if by_all or hook is not None else len(here)
                same([net.module.weight.grad], [torch.full((1, 1), sum(r + 1.0 for r in here) / divisor)], tolerance)


@feature
def works_that_nobody_waits_for_stay_few():
    for _ in range(2000):
        dist.all_reduce(torch.ones(1), async_op=True)
    large = dist.all_reduce(torch.ones(5000), async_op=True)
    dist.barrier()
    del large
    require(len(RELEASED) == 256 and not RELEASED[-1].result() and RELEASED[-2].result(), len(RELEASED))


class Slow(torch.autograd.Function):
    """Takes half a second in the backward pass."""

    ended_s = 0.0

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.5)
        Slow.ended_s = time.perf_counter()
        return gradient


@feature
def ddp_sums_buckets_while_the_backward_pass_goes_on():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 300_000, bias=False), nn.Linear(300_000, 8, bias=False)

        def forward(self, x):
            return self.last(Slow.apply(self.first(x)))

    summed_s = {}

    def hook(state, bucket):
        def done(work):
            summed_s[bucket.index()] = time.perf_counter()
            return work.value()[0] / size

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(done)

    model = DistributedDataParallel(Layers(), bucket_cap_mb=1)
    model.register_comm_hook(None, hook)
    for _ in range(2):  # buckets are made anew after the first step
        summed_s.clear()
        model(inputs[mine]).sum().backward()
    require(len(summed_s) == 2 and summed_s[0] < Slow.ended_s < summed_s[1], summed_s, Slow.ended_s)


@feature
def ddp_hooks():
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        net = DistributedDataParallel(network())
        net.register_comm_hook(None, hook)
        train(net, sgd(net.parameters()), inputs[mine], targets[mine])
        same(net.parameters(), alone(), 1e-2)
    net = DistributedDataParallel(network())
    net.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
    train(net, sgd(net.parameters()), inputs[mine], targets[mine])
    same_on_all_ranks(net.parameters())


@feature
def ddp_hooks_of_every_compressor():
    for name, exact in {"topk": {"ratio": 1.0}, "none": {}}.items():
        net = DistributedDataParallel(network())
        net.register_comm_hook(CompressionState({"name": name, **exact}), compressed)
        train(net, sgd(net.parameters()), inputs[mine], targets[mine])
        same(net.parameters(), alone())
    for name in catalogue("compressors").available():
        net = DistributedDataParallel(network(), bucket_cap_mb=0.0005)
        net.register_comm_hook(CompressionState(name), compressed)
        train(net, sgd(net.parameters()), inputs[mine], targets[mine])
        same_on_all_ranks(net.parameters())


def same_on_all_ranks(params):
    for param in params:
        everyone = [torch.empty_like(param) for _ in range(size)]
        dist.all_gather(everyone, param.detach())
        require(all(torch.equal(one, everyone[0]) for one in everyone))


@feature
def fsdp2():
    net, mesh = network(), init_device_mesh("cpu", (size,))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    train(net, sgd(net.parameters()), inputs[mine], targets[mine])
    same([param.full_tensor() for param in net.parameters()], alone())


@feature
def tensor_parallel_on_a_mesh_of_two_dimensions():
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "model"))
    net = parallelize_module(network(), mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(net, sgd(net.parameters()), inputs, targets)
    same([param.full_tensor() for param in net.parameters()], alone())
    whole = torch.arange(64.0).view(8, 8)
    spread = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    for places in ([Shard(1), Shard(0)], [Replicate(), Shard(0)], [Shard(0), Replicate()], [Replicate(), Replicate()]):
        require(torch.equal(spread.redistribute(mesh, places).full_tensor(), whole), places)


@feature
def pipelining():
    torch.manual_seed(2)
    layers = [nn.Linear(8, 8) for _ in range(size)]
    whole = nn.Sequential(*copy.deepcopy(layers))
    F.mse_loss(whole(inputs), targets).backward()
    for schedule in (ScheduleGPipe, Schedule1F1B):
        layer = copy.deepcopy(layers[rank])
        stage = PipelineStage(layer, rank, size, torch.device("cpu"))
        given = (inputs,) if rank == 0 else ()
        schedule(stage, 4, loss_fn=F.mse_loss).step(*given, **({"target": targets} if rank == size - 1 else {}))
        same([layer.weight.grad], [whole[rank].weight.grad])


@feature
def distributed_checkpoint():
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    mesh, whole = init_device_mesh("cpu", (size,)), torch.arange(32.0).view(8, 4)
    checkpoint.save({"x": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=folder[0])
    found = distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)])
    checkpoint.load({"x": found}, checkpoint_id=folder[0])
    require(torch.equal(found.full_tensor(), whole))


@feature
def zero_redundancy_optimizer():
    net = DistributedDataParallel(network())
    train(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01), inputs[mine], targets[mine])
    same(net.parameters(), alone(lambda params: torch.optim.Adam(params, lr=0.01)))


@feature
def post_local_sgd():
    net, (half, _) = DistributedDataParallel(network()), dist.new_subgroups(size // 2)
    net.register_comm_hook(PostLocalSGDState(None, half, start_localSGD_iter=1), post_localSGD_hook)
    averager = PeriodicModelAverager(period=1, warmup_steps=1)
    train(net, PostLocalSGDOptimizer(sgd(net.parameters()), averager), inputs[mine], targets[mine])
    same_on_all_ranks(net.parameters())


@feature
def functional_collectives():
    group, own = dist.group.WORLD, torch.full((4,), float(rank + 1))
    waited = functional.wait_tensor
    total = size * (size + 1) / 2
    require(waited(functional.all_reduce(own, "sum", group)).tolist() == [total] * 4)
    require(
        waited(functional.all_gather_tensor(own, 0, group)).tolist() == [r + 1 for r in range(size) for _ in range(4)]
    )
    require(waited(functional.reduce_scatter_tensor(torch.ones(4 * size), "sum", 0, group)).tolist() == [size] * 4)
    sent = torch.arange(float(size)) + 10 * rank
    found = waited(functional.all_to_all_single(sent, None, None, group)).tolist()
    require(found == [10 * source + rank for source in range(size)])
    require(waited(functional.broadcast(own, 0, group)).tolist() == [1.0] * 4)
    require(
        [waited(one).tolist() for one in functional.all_reduce_coalesced([own, own], "sum", group)] == [[total] * 4] * 2
    )
    gathered = functional.all_gather_into_tensor_coalesced([own, own], group)
    require([len(waited(one)) for one in gathered] == [4 * size] * 2)
    scattered = functional.reduce_scatter_tensor_coalesced([torch.ones(4 * size)] * 2, "sum", [0, 0], group)
    require([waited(one).tolist() for one in scattered] == [[size] * 4] * 2)


@feature
def objects():
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    require(found == [{"rank": r} for r in range(size)])
    dist.gather_object(rank, found if rank == 0 else None)
    require(rank or found == list(range(size)))
    own = [None]
    dist.scatter_object_list(own, list(range(size)) if rank == 0 else None)
    require(own == [rank])
    if rank == 0:
        dist.send_object_list(["a word"], 1)
    if rank == 1:
        dist.recv_object_list(own, 0)
        require(own == ["a word"])


@feature
def sparse_gradients():
    own = torch.sparse_coo_tensor(torch.tensor([[rank, rank + 1]]), torch.ones(2), (size + 1,))
    dist.all_reduce(own)
    require(own.to_dense().tolist() == [1, *[2] * (size - 1), 1])
    dist.all_reduce(own.clone(), async_op=True)
    dist.barrier()
    require(RELEASED[-1].result() == [])  # of the work that nobody holds
    group, dense, calls = dist.group.WORLD, torch.ones(2), dist.group.WORLD._get_sequence_number_for_group()
    works = [dist.all_reduce(one, async_op=True) for one in (dense, own, dense)]
    for work in reversed(works):
        work.wait()
    require(own.to_dense().tolist() == [size, *[2 * size] * (size - 1), size] and dense.tolist() == [size**2] * 2)
    require(group._get_sequence_number_for_group() == calls + 3)
    net = DistributedDataParallel(nn.EmbeddingBag(10, 4, mode="sum", sparse=True))
    net(torch.tensor([[rank, 9]])).sum().backward()
    require(net.module.weight.grad.to_dense()[9].tolist() == [1.0] * 4)


# --- calls that torch's own suite leaves out --------------------------------------------------------------------------
@feature
def sums_of_every_dtype():
    total = size * (size + 1) // 2
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int64, torch.complex64):
        own = torch.full((3, 2), rank + 1).to(dtype).t()  # not contiguous
        dist.all_reduce(own)
        require(torch.equal(own, torch.full((2, 3), total).to(dtype)), dtype)
    some = torch.tensor([rank == 1, False])
    dist.all_reduce(some)
    require(some.tolist() == [True, False])
    scaled = torch.ones(2)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5) if hasattr(dist, "_make_nccl_premul_sum") else halves())
    require(scaled.tolist() == [size / 2] * 2)
    mean = torch.tensor([float(rank)])
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    require(mean.item() == (size - 1) / 2)
    empty = torch.empty(0)
    dist.all_reduce(empty)
    for count in (3, 3_000_000):
        half = torch.full((count,), 40_000.0, dtype=torch.float16)
        dist.all_reduce(half, dist.ReduceOp.AVG)
        require(half.unique().tolist() == [40_000.0], count)


def halves():
    return torch._C._distributed_c10d._make_nccl_premul_sum(0.5)


@feature
def parts_of_uneven_lengths():
    found = [torch.empty(r + 1, 2) for r in range(size)]
    dist.all_gather(found, torch.full((rank + 1, 2), float(rank)))
    require([one.unique().tolist() for one in found] == [[float(r)] for r in range(size)])
    mine = torch.empty(rank + 1)
    dist.reduce_scatter(mine, [torch.full((r + 1,), float(r)) for r in range(size)])
    require(mine.tolist() == [float(rank * size)] * (rank + 1))
    sizes = [r + 1 for r in range(size)]
    out = torch.empty(size * (rank + 1))
    dist.all_to_all_single(out, torch.full((sum(sizes),), float(rank)), [rank + 1] * size, sizes)
    require(out.tolist() == [float(r) for r in range(size) for _ in range(rank + 1)])


@feature
def works_go_on_in_their_order_and_groups_do_not_wait_for_each_other():
    other = dist.new_group(list(range(size)))
    own = torch.ones(1000)
    works = [dist.all_reduce(own, async_op=True) for _ in range(5)]
    if rank == 0:  # the groups' calls are begun in another order here
        later = dist.all_reduce(torch.ones(1), group=other, async_op=True)
        first = dist.broadcast(own, 0, async_op=True)
    else:
        first = dist.broadcast(own, 0, async_op=True)
        later = dist.all_reduce(torch.ones(1), group=other, async_op=True)
    for work in (*works, first, later):
        work.wait()
        require(work.is_completed() and work.exception() is None)
    require(own.tolist() == [float(size**5)] * 1000)
    chained = dist.all_reduce(own, async_op=True).get_future().then(lambda done: done.value()[0] / size)
    require(chained.wait().tolist() == [float(size**5)] * 1000)


@feature
def messages():
    if rank == 0:
        found, sources = torch.empty(2, 3), []
        for _ in range(1, size):
            sources.append(dist.recv(found.t(), tag=7))  # of any rank, and not contiguous
            require(found.tolist() == [[float(sources[-1])] * 3] * 2)
        require(sorted(sources) == list(range(1, size)))
    else:
        dist.send(torch.full((3, 2), float(rank)), 0, tag=7)
    own, found = torch.full((5,), float(rank)), torch.empty(5)
    ops = [dist.P2POp(dist.isend, own, (rank + 1) % size), dist.P2POp(dist.irecv, found, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    require(found.tolist() == [float((rank - 1) % size)] * 5)


@feature
def messages_that_nobody_waits_for_arrive():
    for number in range(8):  # the tensors have no other reference
        dist.isend(torch.full((100, 300), float(number)).t(), (rank + 1) % size, tag=number % 2)
        dist.irecv(torch.zeros(30_000), (rank - 1) % size, tag=2)
    others, found = [torch.zeros(30_000) for _ in range(40)], torch.empty(300, 100)
    for number in (0, 2, 4, 6, 1, 3, 5, 7):
        dist.recv(found, (rank - 1) % size, tag=number % 2)
        require(found.unique().tolist() == [float(number)], number)
    for _ in range(8):
        dist.send(torch.ones(30_000), (rank + 1) % size, tag=2)
    dist.barrier()
    dist.isend(found, (rank + 1) % size, tag=3)
    dist.recv(found, (rank - 1) % size, tag=3)
    require(not any(each.any() for each in others) and len(dist.group.WORLD.comm.calls.abandoned) <= 1)


@feature
def memory_can_be_resized_after_calls():
    group = dist.group.WORLD
    for dtype, n in itertools.product((torch.float32, torch.bfloat16, torch.int64, torch.bool), (4, 4000)):
        own, whole = torch.ones(n, dtype=dtype), torch.ones(n * size, dtype=dtype)
        for call in (
            lambda: dist.all_reduce(own, dist.ReduceOp.MAX), lambda: dist.broadcast(own, 0),
            lambda: group._allgather_base(whole, own).wait(), lambda: group._reduce_scatter_base(own, whole).wait(),
            lambda: dist.all_to_all_single(whole, whole.clone()), lambda: dist.all_reduce(own),
        ):  # fmt: skip
            call(), call()
            for tensor in (own, whole):
                tensor.untyped_storage().resize_(0)
                tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
                tensor.fill_(1)


@feature
def fsdp1_in_mixed_precision():
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    net = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), mixed_precision=half)
    train(net, sgd(net.parameters()), inputs[mine], targets[mine])
    with FullyShardedDataParallel.summon_full_params(net):
        same(net.parameters(), alone(), 2e-2)


@feature
def results_of_works_are_lists_of_tensors():
    own, parts = torch.ones(2), [torch.empty(2) for _ in range(size)]
    for work, count in (
        (dist.all_reduce(own, async_op=True), 1), (dist.all_gather(parts, own, async_op=True), size),
        (dist.gather(own, None if rank else parts, async_op=True), 0 if rank else size),
        (dist.all_to_all(parts, parts, async_op=True), size),
    ):  # fmt: skip
        require(len(work.get_future().wait()) == count and all(torch.is_tensor(each) for each in work.result()))


@feature
def ranks_that_differ_are_told():
    try:
        dist.all_reduce(torch.ones(3 if rank == 0 else 4))
    except RuntimeError as error:
        require("(3,), sum on rank 0" in str(error) and "(4,), sum on rank" in str(error), error)
    else:
        raise AssertionError("it was taken")


@feature
def monitored_barrier():
    dist.group.WORLD.monitored_barrier(timedelta(seconds=60))
    if rank == 1:
        time.sleep(1.5)
    try:
        dist.group.WORLD.monitored_barrier(timedelta(seconds=0.5 if rank == 0 else 60), wait_all_ranks=True)
    except RuntimeError as error:
        require(rank == 0 and str(error).startswith("rank 1 did not reach the monitored barrier"), error)
        # The others wait for rank 0 to say that all have come.
        word = torch.zeros(1, dtype=torch.uint8)
        for other in range(1, size):
            dist.group.WORLD.send([word], other, BARRIER_TAG).wait()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group(hpcdist.torch_backend.NAME)
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs, targets = samples(size)
    mine = slice(OWN * rank, OWN * (rank + 1))
    run(rank, dist.barrier)
    dist.destroy_process_group()
