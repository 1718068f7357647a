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
    """Adam's moments m and v, and the step θ ← θ − η(m/(√v + ε) + λθ); β₁, β₂, ε, η and λ are read from the groups.

    There is no bias correction, as in the published codes: warm up the learning rate. An element whose gradients were
    all 0 has v = 0 and is not updated, because a one-bit code has no zero and would move it by m/ε.

    On one rank the optimiser takes its own step.
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

    def update_moments(self, item: Trained, gradient: Tensor, *, squares: bool) -> None:
        """Update the moments with a gradient: m, and v if `squares`."""
        (m, v), (beta, beta_squares) = self.moments(item.parameter), item.group["betas"]
        m.mul_(beta).add_(gradient, alpha=1 - beta)
        if squares:
            v.mul_(beta_squares).addcmul_(gradient, gradient, value=1 - beta_squares)
        else:
            self.zero_untrained(item, m)

    def zero_untrained(self, item: Trained, values: Tensor) -> Tensor:
        """Set the values of elements without a gradient so far (v = 0) to 0, in place; return them."""
        return values.masked_fill_(self.moments(item.parameter)[1] == 0, 0)

    def scale(self, item: Trained) -> Tensor:
        """Return √v + ε."""
        return self.moments(item.parameter)[1].sqrt().add_(item.group["eps"])

    def direction(self, item: Trained) -> Tensor:
        """Return m/(√v + ε)."""
        return self.moments(item.parameter)[0] / self.scale(item)

    def step_along(self, item: Trained, direction: Tensor) -> None:
        """Move a parameter by −η(direction + λθ), and count the step."""
        rate, decay = rate_of(item.group), item.group["weight_decay"]
        self.optimizer.state[item.parameter]["step"] += 1  # type: ignore[union-attr]
        item.parameter.sub_(direction.add(item.parameter, alpha=decay) if decay else direction, alpha=rate)

    def _check_settings(self, optimizer: torch.optim.Optimizer) -> None:
        super()._check_settings(optimizer)
        coupled = [group for group in optimizer.param_groups if group["weight_decay"]]
        if coupled and not coupled[0].get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)):
            raise self.setting_error("weight_decay", 0, coupled[0]["weight_decay"])
