"""One training of the study beside EXO Gym, by the one or by the other.

    python jobs/studies/exo_gym_job.py hpcdist diloco 4 0 trained.pt    # by whom, strategy, nodes, seed, file

The same perceptron, digits, batches and optimisers. The mean of all nodes' parameters is saved, and its loss.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hpcdist.strategies.base import Contract, Outcome, Strategy

STEPS, BATCH, PERIOD, RATE, SHARE = 200, 16, 20, 1e-3, 0.005


def digits() -> TensorDataset:
    found = load_digits()
    return TensorDataset(torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target))


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class WithLoss(nn.Module):
    """A model as EXO Gym wants it: its output is the loss of a batch."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class Averaged(Strategy):
    """A user's own strategy: average the parameters every `period` steps."""

    class Config(Strategy.Config):
        """Options of the average."""

        period: int = PERIOD

    contract = Contract(averages="parameters", synchronizes="every step")

    def advance(self, update: Any) -> Outcome:
        outcome = self.gradients.step_alone(update)
        if (self.steps + 1) % self.config.period == 0:
            for params in self.model.params:
                self.comm.allreduce(params)
                params /= self.comm.size
        return outcome


def by_hpcdist(name: str, nodes: int, seed: int) -> nn.Module:
    """Train on virtual ranks, in this process."""
    import hpcdist as hd
    from hpcdist.comm.virtual import VirtualCommunicator, run_virtual

    data = digits()
    options = {"local_sgd": {"period": PERIOD}, "diloco": {"period": PERIOD}, "sparta": {"share": SHARE}}.get(name, {})
    word = f"{__file__}:Averaged" if name == "own" else name

    def body(comm: VirtualCommunicator) -> nn.Module:
        hd.init(comm=comm)
        trained = WithLoss(model(seed))
        kind: Any = torch.optim.SGD if name == "demo" else torch.optim.AdamW
        optimizer = hd.DistributedOptimizer(kind(trained.parameters(), RATE), trained, strategy=word, **options)
        loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, comm.size, comm.rank))
        steps = 0
        while steps < STEPS:
            for batch in loader:
                optimizer.zero_grad()
                trained(batch).backward()
                optimizer.step()
                if (steps := steps + 1) == STEPS:
                    break
        return trained.net

    nets = run_virtual(body, nodes)
    with torch.no_grad():
        for of_all in zip(*(net.parameters() for net in nets), strict=True):
            of_all[0].copy_(torch.stack(of_all).mean(0))
    return nets[0]


def by_exo_gym(name: str, nodes: int, seed: int) -> nn.Module:
    """Train with a process per node."""
    import exogym

    from kit.exo_gym import STRATEGIES

    data, trained = digits(), WithLoss(model(seed))
    trainer = exogym.Trainer(trained, data, data)
    sizes = {"max_steps": STEPS, "batch_size": BATCH, "minibatch_size": BATCH, "val_size": 0}
    return trainer.fit(1, STRATEGIES[name](RATE, PERIOD, SHARE), nodes, device="cpu", seed=seed, **sizes).net


if __name__ == "__main__":
    by, name, nodes, seed, file = sys.argv[1:]
    net = {"hpcdist": by_hpcdist, "exo-gym": by_exo_gym}[by](name, int(nodes), int(seed))
    with torch.no_grad():
        loss = WithLoss(net)(digits().tensors).item()
    flat = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    torch.save({"loss": loss, "parameters": flat}, file)
