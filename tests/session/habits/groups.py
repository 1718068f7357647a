"""Strategies by what they say of themselves, so that a new one is where it belongs without being named."""

from __future__ import annotations

from hpcdist import strategies
from strategies import problem

ALL = {name: strategies.load(name) for name in problem.stepping()}
SYNCHRONOUS = [name for name, cls in ALL.items() if cls.synchronous]
ASYNCHRONOUS = [name for name in ALL if name not in SYNCHRONOUS]
SERVED = [name for name, cls in ALL.items() if "servers" in cls.Config.model_fields]
SERVERLESS = [name for name in SYNCHRONOUS if name not in SERVED]
GOSSIPS = [name for name in ASYNCHRONOUS if name not in SERVED]
OTHERS = [name for name in ALL if name != "allreduce"]
REPLACING = [name for name, cls in ALL.items() if cls.replaces_parameters]
SENDING = [name for name, cls in ALL.items() if cls.sends_hyperparameters]


def _makes_an_update_of_several(cls: type[strategies.Strategy]) -> bool:
    averages = getattr(cls, "averages", None)
    return averages is not None and averages(cls.Config(), 2)


MEANS = [name for name, cls in ALL.items() if _makes_an_update_of_several(cls)]
