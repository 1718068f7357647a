"""Tensor parallelism inside a node, any strategy across nodes: a loop of one's own, on handwritten digits.

    mpirun -n 4 python jobs/examples/tensor_parallel.py --strategy gossip_pull

`--shards` consecutive ranks hold one model together: torch's parallelize_module gives each some columns of a block's
first matrix and the same rows of its second one. All get the same samples. Each rank's part is averaged with the same
part of the other replicas by the strategy. Model and data are those of jobs/examples/fsdp.py.
"""

from collections.abc import Sequence

import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hpcdist as hd
from fsdp import N_TEST, network, options, own_device, samples


def main(arguments: Sequence[str] | None = None) -> list[float]:
    chosen = options(arguments, __doc__)
    hd.init()
    device = own_device()
    mesh = hd.device_mesh(min(chosen.shards, hd.size()), device_type=device.type)
    torch.manual_seed(chosen.seed)
    model = network().to(device)
    for block in model[1:-1]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    shards = hd.local_shards(model)
    optimizer = torch.optim.AdamW(shards.parameters(), lr=chosen.lr)
    optimizer = hd.DistributedOptimizer(optimizer, shards, strategy=chosen.strategy, clip_norm=chosen.clip_norm)
    train, test = samples(device)
    loader = hd.shard(DataLoader(train, chosen.batch_size, shuffle=True), seed=chosen.seed)
    replica, replicas = hd.rank() // mesh.size(), hd.size() // mesh.size()
    losses = []
    for epoch in range(chosen.epochs):
        total = weights = 0.0
        for x, y in loader:  # the same on all ranks of a replica
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total, weights = total + loader.weight * loss.item(), weights + loader.weight
        losses.append(hd.metric(total / weights if weights else 0.0, weight=weights))
        with hd.consensus(shards), torch.no_grad():  # the model that all replicas stand for
            x, y = (tensor[replica::replicas] for tensor in test.tensors)
            right = int((model(x).argmax(1) == y).sum())
            accuracy = hd.allreduce(right / mesh.size(), "sum") / N_TEST
        if hd.is_main():
            print(f"epoch {epoch + 1:2d}  loss {losses[-1]:.6f}  accuracy {accuracy:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
