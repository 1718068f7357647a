"""The doctor's checks: one file each, found by the file's name, in alphabetical order.

A check is a module with two functions::

    measure(comm, nodes, required) -> dict   Collective. Return plain values, complete on rank 0; bounded in time.
    judge(measured, nodes, required) -> Iterable[Finding]   Report what these values mean; a pure function.
"""

from __future__ import annotations

from types import ModuleType

from hpcdist.registry import CHECKS


def available() -> list[str]:
    """List the names of all checks, sorted: those of this folder, and those that installed packages add."""
    return CHECKS.available()


def load(name: str) -> ModuleType:
    """Load the check of that name, one of `available()`.

    Raises:
        ConfigError: there are two of that name; or what there is can't be imported, or lacks a function.
    """
    return CHECKS.load(name)
