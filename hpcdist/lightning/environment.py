"""The ranks, as Lightning's ClusterEnvironment."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import cached_property

from lightning.fabric.plugins import ClusterEnvironment

from hpcdist.session import broadcast, init, local_rank


class HpcdistEnvironment(ClusterEnvironment):
    """Collective. Describe the ranks that mpirun or srun started to Lightning.

    Args:
        order: ranks of hpcdist in Lightning's order; None: the same order. Lightning's rank 0 logs and writes
            checkpoints, so it should be a worker.
    """

    def __init__(self, order: Sequence[int] | None = None):
        super().__init__()
        self._comm = init()
        self.order = list(range(self._comm.size) if order is None else order)

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @staticmethod
    def detect() -> bool:
        """Return False: it must be passed to a Trainer, or created by an HpcdistStrategy."""
        return False

    def world_size(self) -> int:
        return self._comm.size

    def global_rank(self) -> int:
        return self.order.index(self._comm.rank)

    def local_rank(self) -> int:
        return local_rank()

    def node_rank(self) -> int:
        nodes = list(dict.fromkeys(self._comm.nodes))
        return nodes.index(self._comm.nodes[self._comm.rank])

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher has set it."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher has set it."""

    @property
    def main_address(self) -> str:
        return self._rendezvous[0]

    @property
    def main_port(self) -> int:
        return self._rendezvous[1]

    @cached_property
    def _rendezvous(self) -> tuple[str, int]:
        """An address of the first rank, and a port that was free there. Collective at the first use."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return broadcast((socket.gethostname(), probe.getsockname()[1]), self.order[0])
