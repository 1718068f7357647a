"""FSDP2 inside a node, any strategy across nodes: a loop of one's own, on scikit-learn's handwritten digits.

    mpirun -n 4 python jobs/examples/fsdp.py --strategy gossip_pull
    srun --nodes=8 --ntasks-per-node=4 --gpus-per-task=1 python jobs/examples/fsdp.py --shards 4 --strategy gossip_pull

`--shards` consecutive ranks hold one model together: torch's fully_shard gives each a part of every parameter, and
averages their gradients. Each rank's part is averaged with the same part of the other replicas by the strategy.
"""

import argparse
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, gelu
from torch.utils.data import DataLoader, TensorDataset

import hpcdist as hd

N_TEST = 360


def options(arguments: Sequence[str] | None, about: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=2, help="ranks that hold one model together")
    parser.add_argument("--strategy", default="allreduce", help="across replicas; see `hpcdist strategies`")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="of each replica")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip-norm", type=float, help="largest norm of the whole model's gradient")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(self.norm(x))))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), Block(96), Block(96), nn.Linear(96, 10))


def samples(device: torch.device) -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32, device=device), torch.tensor(labels, device=device)
    return TensorDataset(x[N_TEST:], y[N_TEST:]), TensorDataset(x[:N_TEST], y[:N_TEST])


def own_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(hd.local_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def main(arguments: Sequence[str] | None = None) -> list[float]:
    chosen = options(arguments, __doc__)
    hd.init()
    device = own_device()
    mesh = hd.device_mesh(min(chosen.shards, hd.size()), device_type=device.type)
    torch.manual_seed(chosen.seed)
    model = network().to(device)
    for block in model[1:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # all that is left

    shards = hd.local_shards(model)
    optimizer = torch.optim.AdamW(shards.parameters(), lr=chosen.lr)
    optimizer = hd.DistributedOptimizer(optimizer, shards, strategy=chosen.strategy, clip_norm=chosen.clip_norm)
    train, test = samples(device)
    loader = hd.shard(DataLoader(train, chosen.batch_size, shuffle=True), seed=chosen.seed)
    losses = []
    for epoch in range(chosen.epochs):
        total = weights = 0.0
        for x, y in loader:  # the same on all ranks of a replica, which share it among them
            mine = slice(mesh.get_local_rank(), None, mesh.size())
            optimizer.zero_grad()
            part = cross_entropy(model(x[mine]), y[mine], reduction="sum") / len(x)  # of the replica's mean loss
            (part * mesh.size()).backward()  # for fully_shard takes the mean over the ranks
            optimizer.step()
            total, weights = total + loader.weight * part.item() * mesh.size(), weights + loader.weight
        losses.append(hd.metric(total / weights if weights else 0.0, weight=weights))
        with hd.consensus(shards), torch.no_grad():  # the model that all replicas stand for
            x, y = (tensor[hd.rank() :: hd.size()] for tensor in test.tensors)
            accuracy = hd.allreduce(int((model(x).argmax(1) == y).sum()), "sum") / N_TEST
        if hd.is_main():
            print(f"epoch {epoch + 1:2d}  loss {losses[-1]:.6f}  accuracy {accuracy:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
