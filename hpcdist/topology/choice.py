"""The topology that a strategy's option names."""

from __future__ import annotations

import inspect

from hpcdist import topology
from hpcdist.comm.communicator import Communicator
from hpcdist.config import Named, checked_options
from hpcdist.topology.base import Topology


def make(chosen: Named, comm: Communicator) -> Topology:
    """The topology chosen, for the ranks of `comm`; one that must know their nodes is told, unless the user says them.

    Raises:
        UnknownNameError: there is no topology of that name.
        ConfigError: an option breaks its rule.
    """
    cls, options = topology.load(chosen.name), chosen.options
    if "nodes" in inspect.signature(cls).parameters:
        options.setdefault("nodes", comm.nodes)
    return cls(comm.size, **checked_options(cls.__init__, options, "strategy.topology"))
