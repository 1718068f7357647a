"""The strategies of EXO Gym, as it has them and mended, and a user's own among them; needs the package `exogym`."""

from __future__ import annotations

from typing import Any

import torch
from exogym.strategy.communicate import all_reduce
from exogym.strategy.demo import DeMoStrategy
from exogym.strategy.diloco import DiLoCoStrategy
from exogym.strategy.federated_averaging import FedAvgStrategy
from exogym.strategy.optim import OptimSpec
from exogym.strategy.sparta import SPARTAStrategy
from exogym.strategy.strategy import SimpleReduceStrategy, Strategy


class _CountsFromOne(Strategy):
    """As they are, the first period has a step more than the others."""

    def _init_node(self, *arguments: Any) -> None:
        super()._init_node(*arguments)
        self.local_step = 1


class MendedFedAvg(_CountsFromOne, FedAvgStrategy):
    """Its periods are of one length."""


class MendedDiLoCo(_CountsFromOne, DiLoCoStrategy):
    """The same, and rank 0 gets a copy: as it is, its parameters on a CPU *are* the outer optimiser's from then on."""

    def _synchronize_master_model(self) -> None:
        for parameter, common in zip(self.model.parameters(), self.master_model.parameters(), strict=True):
            parameter.data.copy_(common.data)


class Averaged(Strategy):
    """A user's own strategy: average the parameters every `period` steps."""

    def __init__(self, optim_spec: Any, period: int):
        super().__init__()
        self.optim_spec = optim_spec
        self.period = period

    def _init_node(self, model: Any, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self.optim = self.optim_spec.build(model)

    def step(self) -> None:
        self.optim.step()
        if (self.local_step + 1) % self.period == 0:
            for parameter in self.model.parameters():
                all_reduce(parameter.data)
                parameter.data /= self.num_nodes
        super().step()


def _adam(rate: float) -> Any:
    return OptimSpec(torch.optim.AdamW, lr=rate)


STRATEGIES = {  # by names of ours: a function of learning rate, period and share
    "allreduce": lambda rate, period, share: SimpleReduceStrategy(optim_spec=_adam(rate)),
    "local_sgd": lambda rate, period, share: FedAvgStrategy(optim_spec=_adam(rate), H=period),
    "local_sgd, mended": lambda rate, period, share: MendedFedAvg(optim_spec=_adam(rate), H=period),
    "diloco": lambda rate, period, share: DiLoCoStrategy(optim_spec=_adam(rate), H=period),
    "diloco, mended": lambda rate, period, share: MendedDiLoCo(optim_spec=_adam(rate), H=period),
    "sparta": lambda rate, period, share: SPARTAStrategy(optim_spec=_adam(rate), p_sparta=share),
    "demo": lambda rate, period, share: DeMoStrategy(lr=rate),
    "own": lambda rate, period, share: Averaged(_adam(rate), period),
}
