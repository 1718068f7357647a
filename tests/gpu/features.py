"""Loops as users write them, on a GPU that ranks may share, compared with one process: a script of MPI's ranks.

Prints the name of each feature that does what it should. With names: these alone. Without a GPU it runs on the CPU.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hpcdist as hd
import hpcdist.hvd as hvd
import hpcdist.torch_backend
from harness.features import OWN, STEPS, feature, network, require, run, samples, train
from hpcdist.session.world import current

KIND = "cuda" if torch.cuda.is_available() else "cpu"
comm = hd.init(deadline_s=60, torch_distributed=False)
number = hd.local_rank() % max(1, torch.cuda.device_count())
device = torch.device(KIND, number) if KIND == "cuda" else torch.device(KIND)
own_gpu = KIND == "cpu" or hd.local_size() <= torch.cuda.device_count()
if KIND == "cuda":
    torch.cuda.set_device(device)
inputs, targets = (tensor.to(device) for tensor in samples(comm.size))
mine = slice(OWN * comm.rank, OWN * (comm.rank + 1))


def sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.5)


def same(found, expected, tolerance: float = 1e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=tolerance, atol=tolerance)


def alone(loop: Callable = train) -> list[torch.Tensor]:
    """Train on all samples in one process."""
    net = network().to(device)
    loop(net, sgd(net.parameters()), inputs, targets)
    return [p.detach() for p in net.parameters()]


def shared_folder() -> Path:
    """Collective. Make a folder, the same on all ranks."""
    return Path(comm.gather(tempfile.mkdtemp() if comm.rank == 0 else None)[0])


def in_half(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> int:
    """Train in bfloat16, with one step in which the last sample's loss is infinite; return how many were left out."""
    scaler, skipped = torch.amp.GradScaler(KIND), 0
    for step in range(STEPS + 2):
        optimizer.zero_grad()
        with torch.autocast(KIND, torch.bfloat16):
            loss = F.mse_loss(net(x).float(), y)
        if step == 1 and torch.equal(x[-1], inputs[-1]):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
    return skipped


@feature
def scaled_steps_in_half_precision():
    for overlap in ("on", "off"):
        net = network().to(device)
        optimizer = hd.DistributedOptimizer(sgd(net.parameters()), net, overlap=overlap)
        skipped = in_half(net, optimizer, inputs[mine], targets[mine])
        hd.finish(net)
        require(skipped == 1, skipped)
        same(net.parameters(), alone(in_half), 5e-3)


@feature
def calls_of_all_ranks():
    here = torch.full((4,), comm.rank + 1.0, device=device)
    total = comm.size * (comm.size + 1) / 2
    for found, value in (
        (hd.allreduce(here), total / comm.size),
        (hd.broadcast(here.clone(), 0), 1.0),
        (hd.allreduce(here, "max"), comm.size),
    ):
        require(found.device == device and found.eq(value).all(), found, value)


@feature
def a_thread_beside_the_loop():
    """Averages that leave bucket by bucket are those of one that leaves at the end."""
    found = []
    for overlap in ("on", "off"):
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).to(device)
        torch.manual_seed(3)
        for p in net.parameters():
            nn.init.normal_(p, std=0.1)
        optimizer = hd.DistributedOptimizer(sgd(net.parameters()), net, overlap=overlap, bucket_bytes=16384)
        x = torch.randn(OWN * comm.size, 64, generator=torch.Generator().manual_seed(5)).to(device)
        for _ in range(10):
            optimizer.zero_grad()
            net(x[mine]).square().mean().backward()
            optimizer.step()
        hd.finish(net)
        found.append([p.detach() for p in net.parameters()])
    require(all(torch.equal(a, b) for a, b in zip(*found, strict=True)))


@feature
def horovods_calls():
    hvd.init()
    net = network().to(device)
    optimizer = hvd.DistributedOptimizer(sgd(net.parameters()), named_parameters=net.named_parameters())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(net, optimizer, inputs[mine], targets[mine])
    same(net.parameters(), alone())
    gathered = hvd.allgather(torch.full((comm.rank + 1, 2), float(comm.rank), device=device))
    require(gathered.device == device and len(gathered) == comm.size * (comm.size + 1) // 2, gathered)
    several = [torch.full((3,), number + comm.rank, device=device) for number in (10.0, 20.0)]
    summed = hvd.grouped_allreduce(several, op=hvd.Average)
    middle = (comm.size - 1) / 2
    require(all(each.device == device for each in summed), summed)
    require([each.tolist() for each in summed] == [[number + middle] * 3 for number in (10, 20)], summed)


@feature
def ddp_on_the_backend():
    """The model is on the GPU, and its gradients go through pinned host memory."""
    dist.init_process_group("hpcdist")
    net = DistributedDataParallel(network().to(device), device_ids=[number] if KIND == "cuda" else None)
    train(net, sgd(net.parameters()), inputs[mine], targets[mine])
    same(net.parameters(), alone())
    sharded = fully_shard(network().to(device), mesh=init_device_mesh(KIND, (comm.size,)))
    train(sharded, sgd(sharded.parameters()), inputs[mine], targets[mine])
    same((p.full_tensor() for p in sharded.parameters()), alone())
    dist.destroy_process_group()


def _all_calls(on: torch.device) -> list[torch.Tensor]:
    """Call all that torch.distributed has; return what was given and what came, of equal sizes, on the host."""

    def values(offset: int) -> torch.Tensor:
        return torch.arange(3.0, device=on) + 10 * comm.rank + 100 * offset

    size, given, out = comm.size, [values(n) for n in range(comm.size)], [values(50 + n) for n in range(comm.size)]
    found = [values(n) for n in range(70, 90)]
    long = torch.cat([values(n) for n in range(size)])
    joint, exchanged = torch.zeros_like(long), torch.zeros_like(long)
    dist.all_gather(out, found[0])
    dist.all_gather_into_tensor(joint, found[1])
    dist.reduce_scatter(found[2], given)
    dist.reduce_scatter_tensor(found[3], long)
    dist.all_to_all_single(exchanged, long)
    dist.reduce(found[4], 0)
    dist.broadcast(found[5], size - 1)
    dist.scatter(found[6], given if comm.rank == 0 else None, src=0)
    gathered = [values(30 + n) for n in range(size)]
    dist.gather(found[7], gathered if comm.rank == 0 else None, dst=0)
    passed = [values(40 + n) for n in range(size)]
    dist.all_to_all(passed, given)
    dist.all_reduce_coalesced(found[8:11])
    works = [dist.all_reduce(each, dist.ReduceOp.MAX, async_op=True) for each in found[11:14]]
    for work in works:
        work.wait()
    if size > 1:
        after, before = (comm.rank + 1) % size, (comm.rank - 1) % size
        pairs = [dist.P2POp(dist.isend, found[14], after), dist.P2POp(dist.irecv, found[15], before)]
        for work in dist.batch_isend_irecv(pairs):
            work.wait()
    return [each.cpu() for each in (*given, *out, *found, long, joint, exchanged, *gathered, *passed)]


@feature
def every_call_of_torch_distributed():
    dist.init_process_group("hpcdist")
    here, there = _all_calls(torch.device("cpu")), _all_calls(device)
    require(all(torch.equal(a, b) for a, b in zip(here, there, strict=True)), here, there)
    dist.destroy_process_group()


@feature
def lightnings_trainer():
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from hpcdist.lightning import HpcdistStrategy

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, index):
            require(batch[0].device == device == self.net[0].weight.device, batch[0].device)
            return F.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return sgd(self.parameters())

    data = TensorDataset(inputs.cpu(), targets.cpu())
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    kind = "gpu" if KIND == "cuda" else "cpu"
    net = Net()
    trainer = Trainer(
        strategy=HpcdistStrategy("allreduce"), accelerator=kind, devices="auto" if KIND == "cuda" else 1,
        max_epochs=STEPS, enable_checkpointing=False, **quiet,
    )  # fmt: skip
    trainer.fit(net, DataLoader(data, OWN))
    same([p.to(device) for p in net.parameters()], alone())


@feature
def transformers_trainer():
    import transformers

    from hf.small import Tokens, arguments, make
    from hpcdist.hf import Trainer

    transformers.utils.logging.set_verbosity_error()
    folder = shared_folder()
    data, model = Tokens(8 * comm.size, even=True), make().float()
    trainer = Trainer(model, arguments(folder, 4, max_steps=4), strategy="allreduce", train_dataset=data)
    require(trainer.args.device == device, trainer.args.device)
    before = trainer.evaluate(data)["eval_loss"]
    trainer.train()
    require(trainer.evaluate(data)["eval_loss"] < before)
    require(all(p.device == device for p in trainer.model.parameters()))
    flat = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    total = hd.allreduce(flat)
    torch.testing.assert_close(total, flat, rtol=1e-6, atol=1e-6)


@feature
def sums_of_gpus_by_nccl():
    """A group of both: tensors of GPUs by NCCL, which takes one rank per GPU, and the host's by MPI."""
    if KIND == "cpu" or not own_gpu:
        return
    dist.init_process_group("cpu:hpcdist,cuda:nccl")
    there, here = torch.ones(5, device=device), torch.ones(5)
    dist.all_reduce(there)
    dist.all_reduce(here)
    require(there.eq(comm.size).all() and here.eq(comm.size).all(), there, here)
    net = DistributedDataParallel(network().to(device), device_ids=[number])
    train(net, sgd(net.parameters()), inputs[mine], targets[mine])
    same(net.parameters(), alone())
    dist.destroy_process_group()


@feature
def stages():
    """A model in two stages; what is distributed from here on must be in stages, too."""
    if comm.size % 2:
        return
    parts = hd.pipeline(network(), stages=2, loss=F.mse_loss, micro_batches=2, device=device)
    hd.DistributedOptimizer(sgd(parts.parameters()), parts)
    replicas = comm.size // 2
    share = slice(*(len(inputs) * (comm.rank // 2 + one) // replicas for one in (0, 1)))
    for _ in range(STEPS):
        parts.step(inputs[share], targets[share])
    hd.finish(parts)
    trained = dict(zip((name for name, _ in network().named_parameters()), alone(), strict=True))
    same(parts.state_dict().values(), [trained[name] for name in parts.state_dict()])


@feature
def a_job():
    """It takes the rank's GPU by itself."""
    from train import tiny

    with tiny.training(comm, shared_folder(), "epochs=2", "log_every=1") as made:
        require(made.device == device, made.device)
        made.run()
        params = [p.clone() for p in made.model.params]
    require(all(p.device == device for p in params))


@feature
def shards_on_a_mesh_of_torchs():
    """By NCCL, where each rank has a GPU of its own; by Gloo on the CPU. Last: the mesh stays."""
    if not own_gpu:
        return
    current().grid = None  # what was trained above, in stages or not, has ended
    current().optimizers.clear()
    net = network().to(device)
    fully_shard(net, mesh=hd.device_mesh(comm.size, device_type=KIND))
    shards = hd.local_shards(net)
    train(net, hd.DistributedOptimizer(sgd(shards.parameters()), shards), inputs[mine], targets[mine])
    same((p.full_tensor() for p in net.parameters()), alone())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run(comm.rank, comm.barrier)
