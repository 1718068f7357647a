"""Apply pushes to a shard with Adagrad, in single precision at least."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hpcdist.model.flat import FlatModel
from hpcdist.model.hyperparameters import Hyperparameters
from hpcdist.strategies.common.state import Entry, tensors
from hpcdist.strategies.server.shards import Shard


class ShardAdagrad:
    """Step along a gradient at the rate γ/√Σg² of each element, times what a schedule makes of the workers' rate.

    Args:
        rate: γ.
        optimizer: the workers', whose schedules are followed.

    Attributes:
        params: the shard, one flat tensor per group, in memory of its own.
    """

    def __init__(
        self,
        model: FlatModel,
        shard: Shard,
        rate: float,
        optimizer: torch.optim.Optimizer | None,
        hyperparameters: Hyperparameters,
    ):
        self._shard, self._rate = shard, rate
        self._first_rate, self._hyperparameters = _reference_rate(optimizer), hyperparameters
        self._parameters = [torch.nn.Parameter(_precise(part)) for part in shard.of(model.params)]
        self.params = [parameter.detach() for parameter in self._parameters]
        self._adagrad = torch.optim.Adagrad(self._parameters, lr=rate)

    def step(self, gradients: Iterable[Tensor], values: Sequence[float]) -> None:
        """Take one step, at the rate that a worker's hyper-parameters ask for."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.device, parameter.dtype)
        self._adagrad.param_groups[0]["lr"] = self._rate * self._relative_rate(values)
        self._adagrad.step()

    def _relative_rate(self, values: Sequence[float]) -> float:
        """Return a worker's learning rate by its first one; 1 where there is no schedule."""
        if not values or "lr" not in (names := self._hyperparameters.names()):
            return 1.0
        rate = values[names.index("lr")]
        return rate / self._first_rate if self._first_rate else float(rate > 0)

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def entries(self) -> list[Entry]:
        """Declare the parameters and Σg²."""
        squares = [self._adagrad.state[parameter]["sum"] for parameter in self._parameters]
        return [tensors("params", self.params, self._cut_anew), tensors("squares", squares, self._cut_anew)]

    def _cut_anew(self, saved: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Join the shards of all servers that saved, which are in order, and cut out this server's."""
        return self._shard.of([torch.cat(list(parts)) for parts in zip(*saved, strict=True)])


def _reference_rate(optimizer: torch.optim.Optimizer | None) -> float:
    """Return the learning rate before any schedule, or a schedule's largest."""
    group = {} if optimizer is None else optimizer.param_groups[0]
    return float(group.get("max_lr", group.get("initial_lr", group.get("lr", 0.0))))


def _precise(part: Tensor) -> Tensor:
    """Copy to float32 at least: in float16 Adagrad's eps is 0, and in bfloat16 a sum soon stops growing."""
    return part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
