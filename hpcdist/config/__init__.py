"""Settings: read from files and flags, checked, and put together to a training job's configuration."""

import importlib

from hpcdist.config.merge import differences, differing, fingerprint, load
from hpcdist.config.settings import Named, Option, Settings, checked_options, describe, meaning, options_of

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
    "checked_options",
    "describe",
    "differences",
    "differing",
    "fingerprint",
    "load",
    "meaning",
    "optimizers",
    "options_of",
    "schedules",
]


def __getattr__(name: str):
    # The remaining names are those of a training job's configuration, which needs torch: that takes seconds to load.
    if name in __all__:
        return getattr(importlib.import_module("hpcdist.config.job"), name)
    raise AttributeError(f"module 'hpcdist.config' has no attribute {name!r}")
