"""The grid of ranks: consecutive ranks jointly hold one model, a replica; every replica has the same stages.

With 2 stages and 3 replicas, ranks are numbered::

                 stage 0   stage 1
    replica 0       0         1       inner communicators: the rows
    replica 1       2         3
    replica 2       4         5       outer communicators: the columns
"""

from __future__ import annotations

import platform
from numbers import Integral

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigError


class Grid:
    """Collective. The ranks of `comm` as replicas of a model in `stages` parts, one on each rank.

    The ranks of a replica communicate many times in a step, so they must share a node. Virtual ranks need not if each
    of them has a separate node: such a cluster has no nodes.

    Args:
        stages: ranks that jointly hold one whole model; 1 for plain data parallelism.
        spread: allow a replica on several nodes.

    Raises:
        ConfigError: `stages` does not divide the number of ranks, or a replica is not on one node.
    """

    def __init__(self, comm: Communicator, stages: int, spread: bool = False):
        self.comm, self.stages = comm, checked_stages(stages, comm.size)
        self.replicas = comm.size // self.stages
        self.replica, self.stage = divmod(comm.rank, self.stages)  # the position of this rank
        if not spread:
            _check_placement(comm, self.stages)
        self.inner = comm.split(self.replica)  # the ranks of this rank's replica; a rank in it is a stage
        self.outer = comm.split(self.stage)  # the ranks that hold this rank's stage; a rank in it is a replica

    def close(self) -> None:
        self.inner.close()
        self.outer.close()


def checked_stages(stages: int, size: int) -> int:
    """Return the number of stages; raise ConfigError if it does not divide the number of ranks."""
    if not isinstance(stages, Integral) or stages < 1:
        raise ConfigError(f"stages must be an integer of at least 1; got {stages!r}.")
    if size % stages:
        fewer, more = size // stages * stages, (size // stages + 1) * stages
        fit = f"{fewer} or {more}" if fewer else f"{more}"
        raise ConfigError(
            f"stages must divide the number of ranks, {size}; got {stages}. Start {fit} ranks, or cut the model into "
            "another number of stages."
        )
    return int(stages)


def _check_placement(comm: Communicator, stages: int) -> None:
    """Raise ConfigError unless each replica is on one node. Collective if it raises."""
    if comm.platform.virtual is not None and len(set(comm.nodes)) == comm.size:
        return
    replicas = [range(first, first + stages) for first in range(0, comm.size, stages)]
    torn = [ranks for ranks in replicas if len({comm.nodes[rank] for rank in ranks}) > 1]
    if not torn:
        return
    hosts = comm.gather(platform.node() if comm.platform.virtual is None else "virtual node")
    nodes_of_stages = [f"rank {rank} on {hosts[rank]} (node {comm.nodes[rank]})" for rank in torn[0]]
    raise ConfigError(
        f"the {stages} ranks of a replica must be on one node; got {len(torn)} of {len(replicas)} replicas on several, "
        f"the first with {', '.join(nodes_of_stages)}. Start consecutive ranks on one node (mpirun --map-by slot, srun "
        f"--distribution=block), a multiple of {stages} on each; or allow it: spread = true."
    )
