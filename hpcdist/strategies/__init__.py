"""Find distribution strategies by name: one file per algorithm, named like the file.

A strategy is the final subclass of `Strategy` in its file; its `Config` holds its options. Code that several
strategies share is in `common`, `server`, `decentralised`, `synchronous` and `lbfgs`.
"""

from __future__ import annotations

from hpcdist.registry import catalogue
from hpcdist.strategies.base import Strategy
from hpcdist.strategies.common.contract import Contract

available = catalogue("strategies").available


def load(name: str) -> type[Strategy]:
    """Load a strategy's class, by its name or as `path/to/file.py:Class`.

    Raises:
        UnknownNameError: no strategy has that name; the message lists the known names.
        ConfigError: two strategies have that name; or the file can't be imported, has no strategy, or its class lacks
            a contract, options or arguments that the library needs.
    """
    cls: type[Strategy] = catalogue("strategies").load(name)
    cls.require_complete(name)
    return cls


__all__ = ["Contract", "Strategy", "available", "load"]
