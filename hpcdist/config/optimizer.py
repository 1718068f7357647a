"""The optimizer's table: a class of torch.optim, its options, and the scaling of its rate by the global batch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from hpcdist.config.settings import Named
from hpcdist.errors import ConfigError, UnknownNameError, suggestion


class OptimizerConfig(Named):
    """A class of torch.optim, with its options.

    Reference: Priya Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017 (linear scaling);
    S. Gupta, W. Zhang, F. Wang, "Model accuracy and runtime tradeoff in distributed deep learning: a systematic study",
    2016 (the square root of μλ/B).
    """

    name: str = Field("SGD", description="class of torch.optim; its other options are keys beside the name")
    lr: float | None = Field(None, ge=0, description="learning rate; none is torch's default for the optimizer")
    scale: Literal["none", "linear", "sqrt"] = Field(
        "none", description="multiplies the rate by the global batch / reference_batch, or by the square root"
    )
    reference_batch: int | None = Field(None, ge=1, description="samples per update for which the rate is right")

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        known = optimizers()
        if self.name not in known:
            raise UnknownNameError("optimizer.name", self.name, known)
        check_options("optimizer", known[self.name], self.options)
        if (self.scale == "none") != (self.reference_batch is None):
            raise ConfigError(
                f"optimizer.scale and optimizer.reference_batch must be given together; got {self.scale!r} and "
                f"{'none' if self.reference_batch is None else self.reference_batch}. The rate is right for that batch."
            )
        self.build([torch.zeros(1, 1, requires_grad=True)])
        return self

    def factor(self, batch: int) -> float:
        """Return the factor of the learning rate for updates by `batch` samples of all workers together."""
        if self.reference_batch is None:
            return 1.0
        ratio = batch / self.reference_batch
        return math.sqrt(ratio) if self.scale == "sqrt" else ratio

    def build(self, parameters: Iterable[Any], factor: float = 1.0) -> torch.optim.Optimizer:
        """Build the optimizer, with its learning rate multiplied by `factor`; raise ConfigError if torch refuses."""
        cls, options = optimizers()[self.name], self.options
        if self.lr is not None or factor != 1.0:
            rate = inspect.signature(cls).parameters["lr"].default if self.lr is None else self.lr
            options = {"lr": rate * factor, **options}
        return call("optimizer", cls, parameters, options)


def optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    return subclasses(torch.optim, torch.optim.Optimizer)


def rescale(optimizer: torch.optim.Optimizer, schedule: Any, ratio: float) -> None:
    """Multiply the rates of an optimizer and its schedule by `ratio`, as when a resumed run has another batch."""
    for group in optimizer.param_groups:
        for key in {"lr", "initial_lr"} & group.keys():
            group[key] *= ratio
    if schedule is None:
        return
    for one in (schedule, *getattr(schedule, "_schedulers", ())):
        for name in {"base_lrs", "_last_lr"} & vars(one).keys():
            setattr(one, name, [rate * ratio for rate in getattr(one, name)])


# --- torch's classes by name, for optimizers and schedules ------------------------------------------------------------
def subclasses(module: Any, base: type) -> dict[str, type]:
    """Return a module's public subclasses of `base`, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base and not name.startswith("_")
    }


def check_options(where: str, algorithm: type, options: Iterable[str]) -> None:
    """Raise ConfigError if an option is not a parameter of the class."""
    reserved = ("params", "optimizer", "schedulers")  # parameters that the user does not give
    known = [name for name in inspect.signature(algorithm).parameters if name not in reserved]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"{where} option must be one of {', '.join(sorted(known))} for {algorithm.__name__}; got {option!r}."
                f"{suggestion(option, known)}"
            )


def call(where: str, algorithm: Callable[..., Any], target: Any, options: dict[str, Any], shown: Any = None) -> Any:
    """Call `algorithm(target, **options)`, and raise ConfigError with the options `shown` if torch refuses them."""
    try:
        return algorithm(target, **options)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        given = options if shown is None else shown
        raise ConfigError(
            f"{where} options must suit torch's {algorithm.__name__}; got {given} ({error}). See torch's reference."
        ) from None
