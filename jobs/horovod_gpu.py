"""The digits job on several GPUs as users of Horovod write it: its optimiser, its broadcasts, a sampler of torch's.

    mpirun -n 4 python jobs/horovod_gpu.py
    srun --ntasks-per-node=4 --gpus-per-task=1 python jobs/horovod_gpu.py --epochs 32

A GPU for each rank where there are GPUs, else its CPU. Model and data are those of jobs/digits.py; `hpcdist train
jobs/digits.py --set strategy.provider=horovod` does the same without a line of it. Horovod: `hpcdist horovod build`.
"""

import argparse
import time
from pathlib import Path

import mpi4py.MPI as MPI  # before Horovod, which then joins the MPI that mpi4py has started

# isort: split
import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from digits import job, model
from hpcdist.data import HDF5Dataset


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=job.defaults["epochs"])
    parser.add_argument("--batch-size", type=int, default=job.defaults["batch_size"], help="of each rank")
    parser.add_argument("--lr", type=float, default=job.defaults["optimizer"]["lr"])
    parser.add_argument("--gamma", type=float, default=job.defaults["schedule"]["gamma"], help="of lr, per epoch")
    parser.add_argument("--fp16", action="store_true", help="send gradients in half precision")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=Path("data/digits.h5"), help="made if need be")
    return parser.parse_args()


def local_device() -> torch.device:
    """One GPU for each rank of a node; the only one where the launcher shows each rank its own."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def samples(path: Path, split: str) -> TensorDataset:
    with HDF5Dataset(path, split) as data:
        return TensorDataset(*data.batch(range(len(data))))


def mean(value: Tensor, name: str) -> float:
    """Collective. Over all ranks."""
    return hvd.allreduce(value, name=name, op=hvd.Average).item()


def train(network: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, device: torch.device) -> float:
    """Collective. One epoch; the mean loss over all ranks."""
    network.train()
    total = torch.zeros((), device=device)
    for x, y in loader:
        optimizer.zero_grad()
        loss = job.loss(network(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
        loss.backward()  # hooks hand each gradient to Horovod as soon as it is there
        optimizer.step()  # waits for their means
        total += loss.detach()
    return mean(total / len(loader), "loss")


@torch.no_grad()
def accuracy(network: nn.Module, test: TensorDataset, device: torch.device) -> float:
    """Collective. Of each rank's share of the test samples, all together."""
    network.eval()
    x, y = (t[hvd.rank() :: hvd.size()].to(device) for t in test.tensors)
    right = hvd.allreduce((network(x).argmax(1) == y).sum().double(), name="right", op=hvd.Sum)
    return right.item() / len(test)


def main() -> None:
    chosen = options()
    hvd.init(comm=MPI.COMM_WORLD)
    device = local_device()
    if hvd.rank() == 0:
        nccl = "with NCCL" if hvd.nccl_built() else "without NCCL"
        print(f"{hvd.size()} ranks on {device.type}, Horovod {nccl}", flush=True)
        if not chosen.data.exists():
            chosen.data.parent.mkdir(parents=True, exist_ok=True)
            job.data(chosen.data)
    hvd.barrier()

    torch.manual_seed(chosen.seed)
    network = model().to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=chosen.lr)
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if chosen.fp16 else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(optimizer, network.named_parameters(), compression=compression)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, chosen.gamma)
    torch.manual_seed(chosen.seed + 1 + hvd.rank())  # dropout differs between ranks

    data = samples(chosen.data, "train")
    sampler = DistributedSampler(data, hvd.size(), hvd.rank(), seed=chosen.seed)
    loader = DataLoader(data, chosen.batch_size, sampler=sampler, pin_memory=device.type == "cuda")
    test = samples(chosen.data, "test")
    for epoch in range(chosen.epochs):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        loss = train(network, optimizer, loader, device)
        seconds = time.perf_counter() - start
        schedule.step()
        found = accuracy(network, test, device)
        if hvd.rank() == 0:
            speed = len(sampler) * hvd.size() / seconds
            print(f"epoch {epoch + 1:2d}  loss {loss:.4f}  accuracy {found:.4f}  {speed:.0f} samples/s", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
