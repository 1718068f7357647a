"""Makes hpcdist's data files from other formats: one module each, found by its name.

Every module has one function `convert(source, destination, **options) -> Path`, whose keyword-only arguments are the
options: their types and defaults are in its signature, their meaning in its docstring. A new format is one new file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

from hpcdist.errors import UnknownNameError


def available() -> list[str]:
    """The names of all importers."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(name: str) -> Callable[..., Path]:
    """The `convert` function of the importer of that name. Raises UnknownNameError where there is none."""
    if name not in available():
        raise UnknownNameError("importer", name, available())
    return importlib.import_module(f"{__name__}.{name}").convert
