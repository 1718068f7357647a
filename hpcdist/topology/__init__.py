"""Topologies: graphs of ranks that average with each other, with weights. One file for each topology, loaded by name.

A topology is a pure function of (rank, size, step): it does not communicate, and all ranks compute the same result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from hpcdist.comm.communicator import Communicator
from hpcdist.config.settings import Named, checked_options
from hpcdist.registry import catalogue
from hpcdist.topology.base import Topology

__all__ = ["Topology", "available", "load", "make_topology"]

available = catalogue("topologies").available
load: Callable[[str], type[Topology]] = catalogue("topologies").load


def make_topology(chosen: Named, comm: Communicator) -> Topology:
    """Create the chosen topology for the ranks of `comm`. An option `nodes`, if the topology has one, is `comm.nodes`.

    Raises:
        UnknownNameError: no topology has this name.
        ConfigError: an option breaks its rule.
    """
    cls, options = load(chosen.name), chosen.options
    if "nodes" in inspect.signature(cls).parameters:
        options.setdefault("nodes", comm.nodes)
    return cls(comm.size, **checked_options(cls, options, "strategy.topology"))
