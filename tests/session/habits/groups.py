"""Strategies by what they say of themselves, so that a new one is where it belongs without being named."""

from __future__ import annotations

from hpcdist import strategies
from strategies import problem

ALL = {name: strategies.load(name) for name in problem.stepping()}
SYNCHRONOUS = [name for name, cls in ALL.items() if cls.contract.synchronous]
ASYNCHRONOUS = [name for name in ALL if name not in SYNCHRONOUS]
SERVED = [name for name, cls in ALL.items() if "servers" in cls.Config.model_fields]
SERVERLESS = [name for name in SYNCHRONOUS if name not in SERVED]
GOSSIPS = [name for name in ASYNCHRONOUS if name not in SERVED]
OTHERS = [name for name in ALL if name != "allreduce"]
REPLACING = [name for name, cls in ALL.items() if cls.contract.parameters == "replaced"]
SENDING = [name for name, cls in ALL.items() if cls.contract.updates == "on servers"]


MEANS = [name for name, cls in ALL.items() if not cls.contract.uses_changed_gradients]
