"""Settings: where they come from, how they are checked, and what a training job consists of."""

from hpcdist.config.compare import differences, fingerprint
from hpcdist.config.job import (
    CheckpointConfig,
    DataConfig,
    JobConfig,
    OptimizerConfig,
    ScheduleConfig,
    StrategyConfig,
    optimizers,
    schedules,
)
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
