"""The shared parts of a virtual run: the cluster, the groups of ranks of communicators, and one rank in its group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from hpcdist.comm.capabilities import Failures, Traffic
from hpcdist.comm.transfer import ANY
from hpcdist.comm.virtual.arrivals import Arrivals
from hpcdist.comm.virtual.clock import VirtualClock
from hpcdist.comm.virtual.collectives import Gathering, rounds
from hpcdist.comm.virtual.compute import ComputeModel, describe
from hpcdist.comm.virtual.network import Network, Path, Wiring
from hpcdist.errors import CommunicationError


class Cluster:
    """The clock, the network and the compute model, which all communicators of one run share."""

    def __init__(self, size: int, seed: int, network: Network, compute: ComputeModel):
        self.clock, self.wiring, self.compute = VirtualClock(size, seed), Wiring(network, size), compute
        self.description = {"network": asdict(network), "compute": describe(compute)}
        sequences = (np.random.SeedSequence(seed, spawn_key=(rank, 1)) for rank in range(size))
        self.generators = [np.random.default_rng(sequence) for sequence in sequences]


class Group:
    """The objects that the ranks of one communicator share. `members` are their ranks in the whole run."""

    def __init__(self, cluster: Cluster, members: list[int]):
        self.cluster, self.members = cluster, members
        ranks = [cluster.clock.ranks[member] for member in members]
        self.gathering = Gathering(cluster.clock, ranks)
        self.arrivals = [Arrivals(rank, cluster.clock) for rank in ranks]
        self.latency_s, self.bandwidth_bytes_s = cluster.wiring.slowest(members)

    def rounds_s(self, n_bytes: int = 0) -> float:
        """Compute the seconds of log2 p rounds, each of one message of n bytes."""
        return rounds(len(self.members)) * (self.latency_s + n_bytes / self.bandwidth_bytes_s)


class Member:
    """Begin, time and count the calls of one rank of a group.

    Args:
        failures: with the virtual seconds that a blocking call may take.
        traffic: the account of its calls.
    """

    def __init__(self, group: Group, rank: int, failures: Failures, traffic: Traffic):
        self.group, self.rank, self.size, self.failures = group, rank, len(group.members), failures
        self.traffic, self.clock = traffic, group.cluster.clock
        self.me = self.clock.ranks[group.members[rank]]
        self.arrivals = group.arrivals[rank]
        self.closed = False

    def enter(self, *, polling: bool = False) -> None:
        """Begin a call of the seam; each of them calls this first."""
        self.clock.enter(self.me, polling=polling)
        if self.closed:
            raise CommunicationError("a communicator must not be used once it is closed. Close it after its last use.")

    @contextmanager
    def counted(self, what: str) -> Iterator[None]:
        """Add the virtual time that passes to `communicating_s` or `waiting_s` of the traffic."""
        start_s = self.clock.now_s
        try:
            yield
        finally:
            setattr(self.traffic, what, getattr(self.traffic, what) + self.clock.now_s - start_s)

    def path_to(self, rank: int) -> Path:
        return self.group.cluster.wiring.path(self.group.members[self.rank], self.group.members[rank])

    def path_from(self, rank: int) -> Path:
        return self.group.cluster.wiring.path(self.group.members[rank], self.group.members[self.rank])

    def meet(
        self,
        call: str,
        given: Any = None,
        conclude: Callable[[list], tuple[list, float]] | None = None,
        counted: str = "waiting_s",
    ) -> Any:
        """Collective. Wait for the other ranks, see Gathering.meet; by default without a result, as in a barrier."""
        self.enter()
        if conclude is None:
            conclude = self._barrier
        with self.counted(counted):
            result = self.group.gathering.meet(self.rank, call, given, conclude, self.failures.deadline_s)
        if counted == "waiting_s":
            self.traffic.sent(0, rounds(self.size))
        return result

    def _barrier(self, given: list) -> tuple[list, float]:
        return [None] * self.size, self.group.rounds_s()

    def describe(self, source: int, tag: int) -> str:
        """Describe the messages that a receive or a probe matches; ranks by their numbers in the whole run."""
        whom = "any rank" if source == ANY else f"rank {self.group.members[source]}"
        return f"a message from {whom}, {'any tag' if tag == ANY else f'tag {tag}'}"
