"""All settings of a run, and those that differ when it is resumed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpcdist import strategies
from hpcdist.config.job import JobConfig
from hpcdist.config.merge import Changes, by_value, changes
from hpcdist.config.optimizer import OWN_RATES, optimizers, schedules
from hpcdist.config.settings import without_changeable
from hpcdist.errors import CheckpointError

Trainer = Any  # of this library or of a baseline, which import this module


def all_settings(trainer: Trainer) -> dict[str, Any]:
    """Return every setting of a run in types that JSON has, with the defaults of torch, the strategy and the model."""
    config = trainer.config
    values = config.model_dump()
    values["data"] |= trainer.data
    values["strategy"] = {"name": config.strategy.name, **trainer.strategy_options}
    values["optimizer"] = _with_defaults(optimizers()[config.optimizer.name], values["optimizer"])
    if config.schedule.name is not None:
        values["schedule"] = _with_defaults(schedules()[config.schedule.name], values["schedule"])
    values["model"] = _with_defaults(trainer.job.model, values["model"])
    return by_value(values)


def _with_defaults(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Complete options by the function's defaults, also where an option is None."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # written in C
        return options
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty and p.name != "optimizer"}
    return defaults | {k: value for k, value in options.items() if value is not None or defaults.get(k) is None}


def changes_since(meta: Mapping[str, Any], trainer: Trainer) -> Changes:
    """Return the settings that differ from those of a checkpoint's run, except those declared as `MayChange`."""
    saved = meta.get("settings")
    now = without_changeable(JobConfig, all_settings(trainer))
    if not isinstance(saved, Mapping):
        return {}
    config = strategies.load(trainer.config.strategy.name).Config
    return changes({**saved, "strategy": config.with_current_names(saved["strategy"])}, now)


def apply_changes(optimizer: Optimizer, schedule: LRScheduler | None, changed: Changes, path: Path) -> None:
    """Set changed options of the optimiser and of the schedule again, after loading a checkpoint's state.

    Raises CheckpointError if the schedule's state depends on the former option.
    """
    for setting, (saved, now) in changed.items():
        table, _, key = setting.partition(".")
        if table == "optimizer" and key in optimizer.defaults and key != "lr":
            for group in optimizer.param_groups:
                group[key] = optimizer.defaults[key]
        if table == "schedule":
            if type(schedule).__name__ in OWN_RATES or not hasattr(schedule, key):
                raise CheckpointError(
                    f"{setting} must be that of the checkpoint to resume from it, {saved!r:.80}; got {now!r:.80}. "
                    f"The schedule's state depends on it: resume with the one of {path}."
                )
            setattr(schedule, key, now)


def rate_ratio(config: JobConfig, changed: Changes) -> float:
    """Return the factor by which `optimizer.lr` has changed."""
    saved, now = changed.get("optimizer.lr", (None, None))
    if not saved or now is None or config.schedule.name in OWN_RATES:
        return 1.0
    return now / saved
