"""A model in two stages, a rank of each node for each, and data parallel across nodes: a user's own script.

Both stages of a node take the node's samples through the model, activations go forwards and their gradients back;
then each stage's gradients are summed with those of the same stage on other nodes. Writes the loss of every step and
the host of each rank into the run's folder.
"""

import json
import os
import socket
from pathlib import Path

import torch

import hpcdist as hd

STEPS, SAMPLES, WIDTH = 5, 8, 6

comm = hd.init()
node = comm.split(comm.memory.nodes[comm.rank])  # the stages of this node
across = comm.split(node.rank)  # this stage on every node
torch.manual_seed(node.rank)
stage = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
x = torch.randn(comm.size, SAMPLES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
x = x[across.rank]

losses = []
for _ in range(STEPS):
    optimizer.zero_grad()
    activations, upstream = torch.empty_like(x), torch.empty_like(x)
    if node.rank == 0:
        forward = stage(x)
        activations.copy_(forward.detach())
    node.broadcast(activations.view(-1), 0)
    if node.rank == 1:
        entered = activations.clone().requires_grad_()
        loss = (stage(entered) - x).square().mean()
        loss.backward()
        upstream.copy_(entered.grad)
        losses.append(loss.item())
    node.broadcast(upstream.view(-1), 1)
    if node.rank == 0:
        forward.backward(upstream)
    for parameter in stage.parameters():
        across.allreduce(parameter.grad.view(-1))
        parameter.grad.div_(across.size)
    optimizer.step()
told = {"host": socket.gethostname(), "stage": node.rank, "losses": losses}
told["weight"] = stage.weight.sum().item()
Path(os.environ["HPCDIST_RUN"], f"rank{comm.rank}.json").write_text(json.dumps(told))
