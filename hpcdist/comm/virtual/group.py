"""The shared parts of a virtual run: the cluster, the groups of ranks of communicators, and one rank in its group.

Sending is buffered: the message is copied when it is posted. Matching is MPI's: by (source, tag), in the order in which
receives were posted, and messages of one source never overtake each other. Receiving from ANY takes the earliest
arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hpcdist.comm.capabilities import Failures, number_nodes
from hpcdist.comm.transfer import ANY, Traffic
from hpcdist.comm.virtual.clock import VirtualClock, VirtualRank
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
        self.arrivals = [Arrivals(rank.rank, cluster.clock) for rank in ranks]
        wiring = cluster.wiring  # collectives are bounded by the links inside a node if all ranks are on one
        self.nodes = number_nodes(wiring.nodes[member] for member in members)
        self.latency_s, self.bandwidth_bytes_s = wiring.network.slowest(self.nodes)

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
        self.arrivals = group.arrivals[rank]
        self.closed = False

    @property
    def me(self) -> VirtualRank:
        """The thread of the rank that makes a call."""
        return self.clock.running(self.group.members[self.rank])

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

    def synchronize(
        self,
        call: str,
        given: Any = None,
        conclude: Callable[[list], tuple[list, float]] | None = None,
        counted: str = "waiting_s",
    ) -> Any:
        """Collective. Wait for the other ranks, see Gathering.synchronize; by default a barrier, without a result."""
        self.enter()
        if conclude is None:
            conclude = self._barrier
        with self.counted(counted):
            result = self.group.gathering.synchronize(self.rank, call, given, conclude, self.failures.deadline_s)
        if counted == "waiting_s":
            self.traffic.sent(0, rounds(self.size))
        return result

    def _barrier(self, given: list) -> tuple[list, float]:
        return [None] * self.size, self.group.rounds_s()

    def describe(self, source: int, tag: int) -> str:
        """Describe the messages that a receive or a probe matches; ranks by their numbers in the whole run."""
        whom = "any rank" if source == ANY else f"rank {self.group.members[source]}"
        return f"a message from {whom}, {'any tag' if tag == ANY else f'tag {tag}'}"


@dataclass(frozen=True, eq=False)
class Message:
    """A message that is under way, or has arrived."""

    source: int
    tag: int
    itemsize: int
    data: Tensor  # bytes

    def fits(self, source: int, tag: int) -> bool:
        return source in (ANY, self.source) and tag in (ANY, self.tag)


class Receive:
    """A posted receive, and its message once that has arrived."""

    def __init__(self, source: int, tag: int):
        self.source, self.tag = source, tag
        self.message: Message | None = None


class Arrivals:
    """The messages that have arrived at one rank of one communicator, and the receives that wait for more."""

    def __init__(self, owner: int, clock: VirtualClock):
        self._owner, self._clock = owner, clock
        self._waiting: VirtualRank | None = None  # the thread that is blocked
        self._arrived: list[Message] = []
        self._posted: list[Receive] = []
        self._awaited: Receive | tuple[int, int] | None = None  # what it is blocked on

    def carry(self, message: Message, path: Path, start_s: float, duration_s: float) -> Iterator[float]:
        """Transfer a message that leaves at `start_s`, as an effect on the clock."""
        yield start_s
        yield path.into.reserve(start_s + path.latency_s, duration_s)[1]
        for receive in self._posted:
            if message.fits(receive.source, receive.tag):
                self._posted.remove(receive)
                receive.message = message
                if receive is self._awaited:
                    self._wake()
                return
        self._arrived.append(message)
        if isinstance(self._awaited, tuple) and message.fits(*self._awaited):
            self._wake()

    def find(self, source: int, tag: int) -> Message | None:
        return next((message for message in self._arrived if message.fits(source, tag)), None)

    def await_message(self, source: int, tag: int, awaits: str, deadline_s: float) -> None:
        """Block until a message has arrived, without receiving it."""
        if self.find(source, tag) is None:
            self._block((source, tag), awaits, deadline_s)

    def await_receive(self, receive: Receive, awaits: str, deadline_s: float) -> None:
        """Block until a receive has its message."""
        if receive.message is None:
            self._block(receive, awaits, deadline_s)

    def _block(self, awaited: Receive | tuple[int, int], awaits: str, deadline_s: float) -> None:
        self._awaited, self._waiting = awaited, self._clock.running(self._owner)
        try:
            self._clock.block(self._waiting, awaits, deadline_s)
        finally:
            self._awaited = self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None:
            self._clock.wake(self._waiting)

    def post(self, receive: Receive) -> None:
        receive.message = self.find(receive.source, receive.tag)
        if receive.message is None:
            self._posted.append(receive)
        else:
            self._arrived.remove(receive.message)
