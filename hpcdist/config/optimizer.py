"""The tables of the optimizer and of its schedule: classes of torch with their options, scaling, warm-up."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim import lr_scheduler

from hpcdist.config.files import is_class, load_function
from hpcdist.config.settings import Field, Named, joint_rule
from hpcdist.errors import ConfigError, UnknownNameError, suggestion


class OptimizerConfig(Named):
    """A class of torch.optim, with its options.

    Reference: Priya Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017 (linear scaling);
    S. Gupta, W. Zhang, F. Wang, "Model accuracy and runtime tradeoff in distributed deep learning: a systematic study",
    2016 (the square root of μλ/B).
    """

    name: str = Field("SGD", "class of torch.optim; its other options are keys beside the name")
    lr: float | None = Field(None, "learning rate; none: the default of the optimizer in torch", ge=0)
    scale: Literal["none", "linear", "sqrt"] = Field(
        "none", "multiplies the rate by (batch of all workers / reference_batch), or by the square root of this"
    )
    reference_batch: int | None = Field(None, "samples per update for which the rate is right", ge=1)

    @joint_rule
    def _check(self) -> None:
        known = optimizers()
        if self.name not in known:
            raise UnknownNameError("optimizer.name", self.name, known)
        check_options("optimizer", known[self.name], self)
        if (self.scale == "none") != (self.reference_batch is None):
            raise ConfigError(
                f"optimizer.scale and optimizer.reference_batch must be given together; got {self.scale!r} and "
                f"{'none' if self.reference_batch is None else self.reference_batch}. The rate is right for that batch."
            )
        self.build([torch.zeros(1, 1, requires_grad=True)])

    def factor(self, batch: int) -> float:
        """Return the factor by which `scale` multiplies the learning rate, for `batch` samples of all workers."""
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
    for part in (schedule, *getattr(schedule, "_schedulers", ())):
        for name in {"base_lrs", "_last_lr"} & vars(part).keys():
            setattr(part, name, [rate * ratio for rate in getattr(part, name)])


# --- torch's classes by name, for optimizers and schedules ------------------------------------------------------------
def subclasses(module: Any, base: type) -> dict[str, type]:
    """Return a module's public subclasses of `base`, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if is_class(value) and issubclass(value, base) and value is not base and not name.startswith("_")
    }


def check_options(where: str, algorithm: type, config: Named) -> None:
    """Raise ConfigError if an option in `config` is neither one of its fields nor a parameter of the class."""
    reserved = {"params", "optimizer", "schedulers"}  # parameters that the user does not give
    known = ({*inspect.signature(algorithm).parameters} | {*type(config).model_fields}) - reserved
    for option in config.options:
        if option not in known:
            raise ConfigError(
                f"{where} option must be one of {', '.join(sorted(known))} for {algorithm.__name__}; got {option!r}."
                f"{suggestion(option, known)}"
            )


def call(where: str, algorithm: Callable[..., Any], target: Any, options: dict[str, Any], display: Any = None) -> Any:
    """Return `algorithm(target, **options)`; raise ConfigError, with the options `display`, if torch refuses them."""
    try:
        return algorithm(target, **options)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        refused = options if display is None else display
        raise ConfigError(
            f"{where} options must suit torch's {algorithm.__name__}; got {refused} ({error}). See torch's reference."
        ) from None


# --- the schedule -----------------------------------------------------------------------------------------------------
MADE_OF_OTHERS = ("ChainedScheduler", "SequentialLR")
OWN_RATES = ("CyclicLR", "OneCycleLR")  # their options set the rates; they ignore the optimizer's
ON_EVALUATIONS = "ReduceLROnPlateau"  # it reads the evaluation's loss
FUNCTION = "lr_lambda"


class SchedulePart(Named):
    """A schedule that is part of another one."""

    name: str = Field(description="class of torch.optim.lr_scheduler; its options are keys beside it")
    schedules: list[SchedulePart] = Field(default_factory=list, description="schedules that it consists of")

    @joint_rule
    def _check(self) -> None:
        _check("schedule.schedules", self)
        if self.name == ON_EVALUATIONS:
            raise ConfigError(
                f"schedule.schedules must be schedules that advance by themselves; got {self.name}, which looks at "
                "evaluations. Use it alone."
            )


class ScheduleConfig(Named):
    """A class of torch.optim.lr_scheduler, with its options, after a warm-up.

    Reference (warm-up): Priya Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017.
    """

    name: str | None = Field(  # type: ignore[assignment]  # a warm-up needs none
        None, "class of torch.optim.lr_scheduler; its options are keys beside it"
    )
    per: Literal["epoch", "step"] = Field("epoch", "unit in which the schedule advances")
    schedules: list[SchedulePart] = Field(
        default_factory=list, description="tables of the schedules that SequentialLR or ChainedScheduler consists of"
    )
    warmup_steps: int = Field(0, "steps in which the rate rises evenly before the schedule begins", ge=0)
    warmup_from: float | None = Field(
        None, "first rate as a part of the full one; none: the unscaled one, or 1 / warmup_steps", gt=0, le=1
    )

    @joint_rule
    def _check(self) -> None:
        if self.name is None:
            config = [*self.options, *(["schedules"] if self.schedules else [])]
            if config:
                raise ConfigError(f"schedule.name must be given with the options {', '.join(config)}; got none.")
        else:
            _check("schedule", self)
        if self.warmup_steps and self.per != "step":
            raise ConfigError(
                f"schedule.per must be step with schedule.warmup_steps; got {self.per!r}. Count the schedule in steps, "
                "from the end of the warm-up."
            )
        if self.warmup_steps and self.name in (*OWN_RATES, ON_EVALUATIONS):
            raise ConfigError(
                f"schedule.warmup_steps must be omitted with {self.name}; got {self.warmup_steps}. OneCycleLR has a "
                "warm-up of its own."
            )
        if self.warmup_from is not None and not self.warmup_steps:
            raise ConfigError(
                f"schedule.warmup_steps must be given with schedule.warmup_from; got none, and {self.warmup_from}."
            )

    def build(self, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> lr_scheduler.LRScheduler | None:
        """Build the schedule of this optimizer; None if there is neither a name nor a warm-up.

        A warm-up starts with the unscaled rate; `factor` has multiplied the optimizer's.
        """
        main = None if self.name is None else _build("schedule", self, optimizer)
        if not self.warmup_steps:
            return main
        start = self.warmup_from or (1 / factor if factor > 1 else 1 / self.warmup_steps)
        warmup = lr_scheduler.LinearLR(optimizer, start_factor=start, total_iters=self.warmup_steps)
        if main is None:
            return warmup
        return lr_scheduler.SequentialLR(optimizer, [warmup, main], milestones=[self.warmup_steps])


def schedules() -> dict[str, type[lr_scheduler.LRScheduler]]:
    return subclasses(lr_scheduler, lr_scheduler.LRScheduler)


def with_functions_of(path: Path, table: Any) -> Any:
    """Return a schedule's table in which a function `name` without a file is `path:name`; `path` is the job's file."""
    if isinstance(table, list):
        return [with_functions_of(path, part) for part in table]
    if not isinstance(table, Mapping):
        return table
    complete = {key: with_functions_of(path, value) if key == "schedules" else value for key, value in table.items()}
    if isinstance(name := complete.get(FUNCTION), str) and ":" not in name:
        complete[FUNCTION] = f"{path}:{name}"
    return complete


def _check(where: str, config: SchedulePart | ScheduleConfig) -> None:
    known = schedules()
    if config.name not in known:
        raise UnknownNameError(f"{where}.name", str(config.name), known)
    if (config.name in MADE_OF_OTHERS) != bool(config.schedules):
        raise ConfigError(
            f"schedule.schedules must be given with {' and '.join(MADE_OF_OTHERS)}, and only there; got "
            f"{len(config.schedules) or 'none'} with {config.name}. Write a table [[schedule.schedules]] for each."
        )
    check_options(where, known[config.name], config)


def _build(
    where: str, config: SchedulePart | ScheduleConfig, optimizer: torch.optim.Optimizer
) -> lr_scheduler.LRScheduler:
    """Build the schedule, and the schedules that it consists of. `config.options` is a new dict at each access."""
    cls, options = schedules()[str(config.name)], config.options
    if FUNCTION in options:
        options[FUNCTION] = load_function(str(options[FUNCTION]), f"{where}.{FUNCTION}")
    if config.schedules:
        options["schedulers"] = [_build(f"{where}.schedules", part, optimizer) for part in config.schedules]
    if config.name == "ChainedScheduler":
        return call(where, cls, options.pop("schedulers"), {**options, "optimizer": optimizer}, config.options)
    return call(where, cls, optimizer, options, config.options)
