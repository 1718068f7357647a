"""Make hpcdist's data files from other formats: one module each, found by its name.

Every module has one function `convert(source, destination, **options) -> Path`, whose keyword-only arguments are the
options: their types and defaults are in its signature, their meaning in its docstring. A new format is one new file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hpcdist.registry import catalogue

available = catalogue("importers").available
load: Callable[[str], Callable[..., Path]] = catalogue("importers").load
