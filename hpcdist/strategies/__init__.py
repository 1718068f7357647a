"""Distribution strategies: one file per algorithm, found by the file's name.

A strategy is the final subclass of `Strategy` in its file, and its `Config` holds its options. What several of them
share lies in `families`.
"""

from __future__ import annotations

import importlib
import pkgutil

from hpcdist.errors import UnknownNameError
from hpcdist.strategies.base import Strategy

_NOT_STRATEGIES = {"base"}


def available() -> list[str]:
    """The names of all strategies, sorted."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name not in _NOT_STRATEGIES and not m.ispkg)


def load(name: str) -> type[Strategy]:
    """The strategy's class. Raises UnknownNameError, which lists the known ones."""
    if name not in available():
        raise UnknownNameError("strategy", name, available())
    module = importlib.import_module(f"{__name__}.{name}")
    (found,) = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Strategy) and value.__module__ == module.__name__
    ]
    return found


__all__ = ["Strategy", "available", "load"]
