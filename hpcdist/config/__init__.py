"""Settings: read from files and flags, checked, and combined into a training job's configuration."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and checkers of types; see __getattr__
    from hpcdist.config.merge import changes, describe_changes, differences, differing, fingerprint, load
    from hpcdist.config.settings import (
        Named,
        Option,
        Settings,
        checked_options,
        describe,
        meaning,
        options_of,
        without_changeable,
    )

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "JobConfig",
    "Named",
    "OptimizerConfig",
    "Option",
    "ScheduleConfig",
    "Settings",
    "StrategyConfig",
    "changes",
    "checked_options",
    "describe",
    "describe_changes",
    "differences",
    "differing",
    "fingerprint",
    "load",
    "meaning",
    "optimizers",
    "options_of",
    "schedules",
    "without_changeable",
]
_HOMES = {  # all other names are of `settings`
    "job": ("CheckpointConfig", "DataConfig", "JobConfig", "StrategyConfig"),
    "merge": ("changes", "describe_changes", "differences", "differing", "fingerprint", "load"),
    "optimizer": ("OptimizerConfig", "ScheduleConfig", "optimizers", "schedules"),
}


def __getattr__(name: str) -> Any:
    # Looked up on first use: settings need pydantic, and a job's configuration torch, which takes seconds to load.
    if name in __all__:
        home = next((home for home, names in _HOMES.items() if name in names), "settings")
        return getattr(importlib.import_module(f"hpcdist.config.{home}"), name)
    raise AttributeError(f"module 'hpcdist.config' has no attribute {name!r}")
