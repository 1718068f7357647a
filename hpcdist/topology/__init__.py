"""Who averages with whom, and with which weights: one file per topology, found by the file's name.

A topology is a pure function of (rank, size, step): it communicates nothing, and all ranks compute the same.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache

from hpcdist.errors import UnknownNameError
from hpcdist.topology.base import Topology

__all__ = ["Topology", "available", "load"]


@cache
def _found() -> dict[str, type[Topology]]:
    classes = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ == module.__name__ and issubclass(cls, Topology) and not inspect.isabstract(cls):
                classes[info.name] = cls
    return classes


def available() -> list[str]:
    """The names of all topologies, sorted."""
    return sorted(_found())


def load(name: str) -> type[Topology]:
    """The topology's class, to be made with the number of ranks and its options. Raises UnknownNameError."""
    classes = _found()
    if name not in classes:
        raise UnknownNameError("topology", name, classes)
    return classes[name]
