"""Adam as it is in compressed strategies: two moments without bias correction, kept where torch's Adam keeps them."""

from __future__ import annotations

import abc
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Update, name_of
from hpcdist.strategies.synchronous.own_step import OwnStep, Trained, rate_of


class AdamStep(OwnStep):
    """The moments m and v, and the step θ ← θ − η(m/(√v + ε) + λθ). β₁, β₂, ε, η and λ are those of the groups.

    Nothing corrects the moments' bias towards zero in the first steps, as in the published codes: warm the learning
    rate up. An element whose gradient has always been 0 has v = 0; it stays, because a bit has no zero and would move
    it by m/ε.

    On one rank, which has nothing to save by all this, the optimiser makes its own step.
    """

    contract = replace(OwnStep.contract, optimizer="Adam")
    kinds: ClassVar = (torch.optim.Adam, torch.optim.AdamW)
    plain: ClassVar = {"amsgrad": False, "maximize": False}
    advice: ClassVar = "torch.optim.AdamW, or torch.optim.Adam without weight_decay"

    def __init__(self, config: OwnStep.Config, comm: Communicator, model: FlatModel, **kwargs: Any):
        super().__init__(config, comm, model, **kwargs)
        self.runs_optimizer = comm.size == 1
        half = [slot.name for slot in model.slots if slot.dtype is torch.float16]
        if half and not self.runs_optimizer:
            raise ConfigError(
                f"parameters must be float32, float64 or bfloat16 with {name_of(self)}; got {half[0]!r} in float16, "
                "which holds neither squares of gradients nor Adam's eps. Keep them in float32; use torch.autocast."
            )

    def move(self, update: Update) -> None:
        if self.runs_optimizer:
            update()
        else:
            self.move_all()

    @abc.abstractmethod
    def move_all(self) -> None:
        """Collective. Move the parameters of several ranks, see `move`."""

    def moments(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Return m and v of a parameter."""
        state: dict[str, Any] = self.optimizer.state[parameter]  # type: ignore[union-attr]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state["exp_avg"], state["exp_avg_sq"]

    def take_in(self, one: Trained, gradient: Tensor, *, squares: bool) -> None:
        """Let the moments follow a gradient: both, or m alone."""
        (m, v), (beta, beta_squares) = self.moments(one.parameter), one.group["betas"]
        m.mul_(beta).add_(gradient, alpha=1 - beta)
        if squares:
            v.mul_(beta_squares).addcmul_(gradient, gradient, value=1 - beta_squares)
        else:
            self.still(one, m)

    def still(self, one: Trained, values: Tensor) -> Tensor:
        """Set the values of elements that have had no gradient yet to 0; return them."""
        return values.masked_fill_(self.moments(one.parameter)[1] == 0, 0)

    def scale(self, one: Trained) -> Tensor:
        """Return √v + ε."""
        return self.moments(one.parameter)[1].sqrt().add_(one.group["eps"])

    def direction(self, one: Trained) -> Tensor:
        """Return m/(√v + ε)."""
        return self.moments(one.parameter)[0] / self.scale(one)

    def step_along(self, one: Trained, direction: Tensor) -> None:
        """Move a parameter by −η(direction + λθ), and count the step."""
        rate, decay = rate_of(one.group), one.group["weight_decay"]
        self.optimizer.state[one.parameter]["step"] += 1  # type: ignore[union-attr]
        one.parameter.sub_(direction.add(one.parameter, alpha=decay) if decay else direction, alpha=rate)

    def _check_settings(self, optimizer: torch.optim.Optimizer) -> None:
        super()._check_settings(optimizer)
        coupled = [group for group in optimizer.param_groups if group["weight_decay"]]
        if coupled and not coupled[0].get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)):
            raise self.useless("weight_decay", 0, coupled[0]["weight_decay"])
