"""Topologies, which say who averages with whom and with which weights: one file each, found by the file's name.

A topology is a pure function of (rank, size, step): it communicates nothing, and all ranks compute the same.
"""

from __future__ import annotations

from hpcdist.registry import TOPOLOGIES
from hpcdist.topology.base import Topology

__all__ = ["Topology", "available", "load"]


def available() -> list[str]:
    """List the names of all topologies, sorted: those of this folder, and those that installed packages add."""
    return TOPOLOGIES.available()


def load(name: str) -> type[Topology]:
    """Load a topology's class, by its name or as `path/to/file.py:Class`; construct it with a size and its options.

    Raises:
        UnknownNameError: there is none of that name; lists the known ones.
        ConfigError: there are two of that name; or it can't be imported, or is no topology.
    """
    return TOPOLOGIES.load(name)
