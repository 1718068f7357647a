"""Write a run's metrics for other tools: one file per tool, found by the file's name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable

from hpcdist.errors import ConfigError
from hpcdist.registry import catalogue
from hpcdist.session.loggers.base import LoggedRun, Logger

__all__ = ["LoggedRun", "Logger", "available", "load", "require"]

available = catalogue("loggers").available
load: Callable[[str], type[Logger]] = catalogue("loggers").load


def require(names: Iterable[str]) -> None:
    """Raise UnknownNameError for an unknown logger, and ConfigError if its package is missing."""
    for name in names:
        package = load(name).package
        spec = importlib.util.find_spec(package) if package else None
        if package and (spec is None or spec.origin is None):  # a folder with that name, such as the tool's output
            raise ConfigError(
                f"log must name tools whose packages are installed; got {name!r}, and there is no package {package}. "
                f"Install it (pip install {package}), or remove {name}."
            )
