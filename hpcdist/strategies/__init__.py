"""Find distribution strategies: one file per algorithm, by the file's name.

A strategy is the final subclass of `Strategy` in its file, and its `Config` holds its options. Parts that several of
them share lie in `server`, `decentralised` and `synchronous`.
"""

from __future__ import annotations

from hpcdist.registry import catalogue
from hpcdist.strategies.base import Strategy
from hpcdist.strategies.common.contract import Contract


def available() -> list[str]:
    """List the names of all strategies, those of installed packages included, sorted."""
    return catalogue("strategies").available()


def load(name: str) -> type[Strategy]:
    """Load a strategy's class, by its name or as `path/to/file.py:Class`.

    Raises:
        UnknownNameError: there is none of that name; lists the known ones.
        ConfigError: there are two of that name; or it can't be imported, is no strategy, or lacks a contract,
            options or arguments that the library needs.
    """
    cls: type[Strategy] = catalogue("strategies").load(name)
    cls.require_complete(name)
    return cls


__all__ = ["Contract", "Strategy", "available", "load"]
