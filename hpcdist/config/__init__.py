"""Settings: where they come from, how they are checked, and what a training job consists of."""

import importlib

from hpcdist.config.compare import differences, fingerprint
from hpcdist.config.layers import load
from hpcdist.config.named import Named
from hpcdist.config.settings import Option, Settings, describe, suggestion
from hpcdist.config.signature import checked_options

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "JobConfig",
    "Named",
    "Option",
    "OptimizerConfig",
    "ScheduleConfig",
    "Settings",
    "StrategyConfig",
    "checked_options",
    "describe",
    "differences",
    "fingerprint",
    "load",
    "optimizers",
    "schedules",
    "suggestion",
]


def __getattr__(name: str):
    # The rest is what a training job consists of, which needs torch; that takes seconds to load.
    if name in __all__:
        return getattr(importlib.import_module("hpcdist.config.job"), name)
    raise AttributeError(f"module 'hpcdist.config' has no attribute {name!r}")
