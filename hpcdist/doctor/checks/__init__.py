"""What the doctor examines: one file per check, found by the file's name, in alphabetical order.

A check is a module with two functions::

    measure(comm, nodes, asked) -> dict              Collective. Plain values, complete on rank 0; bounded in time
    judge(measured, nodes, asked) -> Iterable[Finding]    pure: what these values mean
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def available() -> list[str]:
    """The names of all checks, sorted."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def load(name: str) -> ModuleType:
    """The check of that name, one of `available()`."""
    return importlib.import_module(f"{__name__}.{name}")
