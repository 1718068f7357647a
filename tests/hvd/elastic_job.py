"""Trains with `hvd.elastic.run` while ranks die: a script of MPI's ranks, which imports Horovod.

    mpirun --with-ft ulfm -n 4 python -m hpcdist.hvd elastic_job.py '{"2": 7}' FOLDER

By rank, the batch in which it is killed. Each rank that ends writes its steps and parameters to FOLDER/rank.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler

EPOCHS, BATCH, SAMPLES = 3, 10, 240


def network():
    torch.manual_seed(1)
    return nn.Linear(8, 3)


def samples():
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 8)
    return inputs, inputs @ torch.randn(8, 3)


def main(deaths, folder):
    import horovod.torch as hvd  # a test imports this file, too, where there is none

    hvd.init()
    first, steps, told = hvd.rank(), 0, []
    inputs, targets = samples()
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    sampler = hvd.elastic.ElasticSampler(inputs)
    state = hvd.elastic.TorchState(net, optimizer, sampler=sampler, epoch=0, history=[])
    state.register_reset_callbacks([lambda: told.append(hvd.size())])

    @hvd.elastic.run
    def train(state):
        nonlocal steps
        while state.epoch < EPOCHS:
            for number, indices in enumerate(BatchSampler(state.sampler, BATCH, False)):
                steps += 1
                if deaths.get(str(first)) == steps:
                    os.kill(os.getpid(), signal.SIGKILL)
                state.optimizer.zero_grad()
                F.mse_loss(state.model(inputs[indices]), targets[indices]).backward()
                state.optimizer.step()
                state.history.append([indices[:1], hvd.size()])  # rank 0's: all have the same
                state.sampler.record_batch(number, len(indices))
                state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
        return state.history

    history = train(state)
    found = {"history": history, "parameters": [one.tolist() for one in net.parameters()], "told": told}
    (folder / f"{first}.json").write_text(json.dumps(found))
    hvd.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
