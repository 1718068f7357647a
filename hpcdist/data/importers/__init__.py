"""Make hpcdist's data files from other formats: one module each, found by its name.

Every module has one function `convert(source, destination, **options) -> Path`, whose keyword-only arguments are the
options: their types and defaults are in its signature, their meaning in its docstring. A new format is one new file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hpcdist.registry import IMPORTERS


def available() -> list[str]:
    """List the names of all importers, sorted: those of this folder, and those that installed packages add."""
    return IMPORTERS.available()


def load(name: str) -> Callable[..., Path]:
    """Load the function `convert` of the importer of that name, or as `path/to/file.py:convert`.

    Raises:
        UnknownNameError: there is none of that name; lists the known ones.
        ConfigError: there are two of that name; or what there is can't be imported, or is no function.
    """
    return IMPORTERS.load(name)
