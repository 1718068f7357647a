"""The schedule's table: a class of torch.optim.lr_scheduler with its options, and a warm-up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch.optim import lr_scheduler

from hpcdist.config.files import load_function
from hpcdist.config.optimizer import call, check_options, subclasses
from hpcdist.config.settings import Named
from hpcdist.errors import ConfigError, UnknownNameError

MADE_OF_OTHERS = ("ChainedScheduler", "SequentialLR")
OWN_RATES = ("CyclicLR", "OneCycleLR")  # their options set the rates; they ignore the optimizer's
ON_EVALUATIONS = "ReduceLROnPlateau"  # it reads the evaluation's loss
FUNCTION = "lr_lambda"


class SchedulePart(Named):
    """A schedule that is part of another one."""

    name: str = Field(description="class of torch.optim.lr_scheduler; its options are keys beside it")
    schedules: list[SchedulePart] = Field(default_factory=list, description="schedules that it consists of")

    @model_validator(mode="after")
    def _check(self) -> SchedulePart:
        _check("schedule.schedules", self.name, self.options, self.schedules)
        if self.name == ON_EVALUATIONS:
            raise ConfigError(
                f"schedule.schedules must be schedules that advance by themselves; got {self.name}, which looks at "
                "evaluations. Use it alone."
            )
        return self


class ScheduleConfig(Named):
    """A class of torch.optim.lr_scheduler, with its options, after a warm-up.

    Reference (warm-up): Priya Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017.
    """

    name: str | None = Field(  # type: ignore[assignment]  # a warm-up needs none
        None, description="class of torch.optim.lr_scheduler; its options are keys beside it"
    )
    per: Literal["epoch", "step"] = Field("epoch", description="unit in which the schedule advances")
    schedules: list[SchedulePart] = Field(
        default_factory=list, description="tables of the schedules that SequentialLR or ChainedScheduler consists of"
    )
    warmup_steps: int = Field(0, ge=0, description="steps in which the rate rises evenly before the schedule begins")
    warmup_from: float | None = Field(
        None, gt=0, le=1, description="part of the rate at first; none is that before scaling, else 1 / warmup_steps"
    )

    @model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        if self.name is None:
            given = [*self.options, *(["schedules"] if self.schedules else [])]
            if given:
                raise ConfigError(f"schedule.name must be given with the options {', '.join(given)}; got none.")
        else:
            _check("schedule", self.name, self.options, self.schedules)
        if self.warmup_steps and self.per != "step":
            raise ConfigError(
                f"schedule.per must be step with schedule.warmup_steps; got {self.per!r}. Count the schedule in steps, "
                "from the end of the warm-up."
            )
        if self.warmup_steps and self.name in (*OWN_RATES, ON_EVALUATIONS):
            raise ConfigError(
                f"schedule.warmup_steps must be left out with {self.name}; got {self.warmup_steps}. OneCycleLR has a "
                "warm-up of its own."
            )
        if self.warmup_from is not None and not self.warmup_steps:
            raise ConfigError(
                f"schedule.warmup_steps must be given with schedule.warmup_from; got none, and {self.warmup_from}."
            )
        return self

    def build(self, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> lr_scheduler.LRScheduler | None:
        """Build the schedule of this optimizer; None if there is neither a name nor a warm-up.

        Args:
            factor: of the optimizer's scaled rate; a warm-up begins with the unscaled one.

        Raises:
            ConfigError: torch refuses the options, or a function does not exist.
        """
        main = None if self.name is None else _build("schedule", self.name, self.options, self.schedules, optimizer)
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
    """Write a function that a schedule's table names without a file as `path:name`, of the job's file."""
    if isinstance(table, list):
        return [with_functions_of(path, part) for part in table]
    if not isinstance(table, Mapping):
        return table
    complete = {key: with_functions_of(path, value) if key == "schedules" else value for key, value in table.items()}
    if isinstance(name := complete.get(FUNCTION), str) and ":" not in name:
        complete[FUNCTION] = f"{path}:{name}"
    return complete


def _check(where: str, name: str, options: Mapping[str, Any], parts: list[SchedulePart]) -> None:
    known = schedules()
    if name not in known:
        raise UnknownNameError(f"{where}.name", name, known)
    if (name in MADE_OF_OTHERS) != bool(parts):
        raise ConfigError(
            f"schedule.schedules must be given with {' and '.join(MADE_OF_OTHERS)}, and only there; got "
            f"{len(parts) or 'none'} with {name}. Write a table [[schedule.schedules]] for each."
        )
    check_options(where, known[name], options)


def _build(
    where: str, name: str, options: dict[str, Any], parts: list[SchedulePart], optimizer: torch.optim.Optimizer
) -> lr_scheduler.LRScheduler:
    cls, given = schedules()[name], dict(options)
    if FUNCTION in given:
        given[FUNCTION] = load_function(str(given[FUNCTION]), f"{where}.{FUNCTION}")
    if parts:
        given["schedulers"] = [
            _build(f"{where}.schedules", part.name, part.options, part.schedules, optimizer) for part in parts
        ]
    if name == "ChainedScheduler":
        return call(where, cls, given.pop("schedulers"), {**given, "optimizer": optimizer}, options)
    return call(where, cls, optimizer, given, options)
