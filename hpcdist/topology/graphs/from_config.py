"""The topology that a strategy's option names."""

from __future__ import annotations

import inspect

from hpcdist import topology
from hpcdist.comm.communicator import Communicator
from hpcdist.config import Named, checked_options
from hpcdist.topology.base import Topology


def make(chosen: Named, comm: Communicator) -> Topology:
    """Make the chosen topology for the ranks of `comm`; its option `nodes`, if it has one, is theirs by default.

    Raises:
        UnknownNameError: there is no topology of that name.
        ConfigError: an option breaks its rule.
    """
    cls, options = topology.load(chosen.name), chosen.options
    if "nodes" in inspect.signature(cls).parameters:
        options.setdefault("nodes", comm.nodes)
    return cls(comm.size, **checked_options(cls.__init__, options, "strategy.topology"))
