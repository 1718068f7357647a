"""Find distribution strategies: one file per algorithm, by the file's name.

A strategy is the final subclass of `Strategy` in its file, and its `Config` holds its options. Parts that several of
them share lie in `server`, `decentralised` and `synchronous`.
"""

from __future__ import annotations

from hpcdist.registry import catalogue
from hpcdist.strategies.base import Strategy


def available() -> list[str]:
    """List the names of all strategies, those of installed packages included, sorted."""
    return catalogue("strategies").available()


def load(name: str) -> type[Strategy]:
    """Load a strategy's class, by its name or as `path/to/file.py:Class`.

    Raises:
        UnknownNameError: no strategy has this name; the message lists the known ones.
        ConfigError: several have it, it can't be imported, or it is not a strategy.
    """
    return catalogue("strategies").load(name)


def having(attribute: str) -> str:
    """Name the strategies whose class attribute is true, for a message: "a, b or c"."""
    *others, last = (name for name in available() if getattr(load(name), attribute))
    return f"{', '.join(others)} or {last}" if others else last


__all__ = ["Strategy", "available", "having", "load"]
