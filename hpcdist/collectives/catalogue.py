"""The all-reduce algorithms by name: a module of this package that defines one is named as it is."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache

from hpcdist.collectives.base import AllReduce
from hpcdist.errors import UnknownNameError


@cache
def _found() -> dict[str, type[AllReduce]]:
    package = importlib.import_module("hpcdist.collectives")
    classes = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ == module.__name__ and issubclass(cls, AllReduce) and not inspect.isabstract(cls):
                classes[info.name] = cls
    return classes


def available() -> list[str]:
    """The names of all algorithms, `auto` included."""
    return sorted(_found())


def load(name: str) -> type[AllReduce]:
    """The class of the algorithm of that name, to be made with a communicator. Raises UnknownNameError."""
    classes = _found()
    if name not in classes:
        raise UnknownNameError("all-reduce algorithm", name, classes)
    return classes[name]
