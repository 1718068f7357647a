"""Find distribution strategies: one file per algorithm, by the file's name.

A strategy is the final subclass of `Strategy` in its file, and its `Config` holds its options. Parts that several of
them share lie in `server`, `decentralised` and `synchronous`.
"""

from __future__ import annotations

from hpcdist.registry import STRATEGIES
from hpcdist.strategies.base import Strategy


def available() -> list[str]:
    """List all strategies, sorted: those of this folder, and those that installed packages add."""
    return STRATEGIES.available()


def load(name: str) -> type[Strategy]:
    """Load a strategy's class, by its name or as `path/to/file.py:Class`.

    Raises:
        UnknownNameError: there is none of that name; lists the known ones.
        ConfigError: there are two of that name; or it can't be imported, or is no strategy.
    """
    return STRATEGIES.load(name)


def having(attribute: str) -> str:
    """Name the strategies whose class attribute is true, for a message: "a, b or c"."""
    *others, last = (name for name in available() if getattr(load(name), attribute))
    return f"{', '.join(others)} or {last}" if others else last


__all__ = ["Strategy", "available", "having", "load"]
