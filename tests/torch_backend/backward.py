"""Training whose second rank fails in the backward pass of its third step: a script of MPI's ranks.

    mpirun -n 2 python backward.py plain|ddp|fsdp2 hangs|stops|ends|calls|raises|killed

With `ends` the second rank has fewer batches.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hpcdist.torch_backend

DEADLINE_S, STEPS = 3.0, 3
wrapped, how = sys.argv[1:]
FAILS = {
    "hangs": lambda: time.sleep(1000),
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "calls": lambda: dist.broadcast(torch.ones(3), 0),
}


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, now):
        ctx.now = now
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.now:
            if how == "raises":
                raise ValueError("labels must be below 10; got 12.")
            FAILS[how]()
        return gradient, None


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, now):
        return self.last(Fails.apply(self.first(x), now))


dist.init_process_group(hpcdist.torch_backend.NAME)
rank, net = dist.get_rank(), Layers()
if wrapped == "ddp":
    net = DistributedDataParallel(net, bucket_cap_mb=0.0001)
elif wrapped == "fsdp2":
    from torch.distributed.fsdp import fully_shard

    for layer in (net.first, net.last, net):
        fully_shard(layer)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(STEPS - (how == "ends" and rank == 1)):
    if step == STEPS - 2:  # what the first step imports has its own time
        dist.barrier()
        dist.group.WORLD.set_timeout(timedelta(seconds=DEADLINE_S))
    net(torch.randn(4, 8), rank == 1 and step == STEPS - 1 and how != "ends").sum().backward()
    if wrapped == "plain":
        for param in net.parameters():
            dist.all_reduce(param.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
