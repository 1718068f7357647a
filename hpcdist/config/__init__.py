"""Settings: read from files and flags, checked, and put together to a training job's configuration."""

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
_MERGE = ("changes", "describe_changes", "differences", "differing", "fingerprint", "load")
_SETTINGS = (
    "Named", "Option", "Settings", "checked_options", "describe", "meaning", "options_of", "without_changeable"
)  # fmt: skip


def __getattr__(name: str) -> Any:
    # Looked up on first use: settings need pydantic, and a job's configuration torch, which takes seconds to load.
    if name in __all__:
        home = "merge" if name in _MERGE else "settings" if name in _SETTINGS else "job"
        return getattr(importlib.import_module(f"hpcdist.config.{home}"), name)
    raise AttributeError(f"module 'hpcdist.config' has no attribute {name!r}")
