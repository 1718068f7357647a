"""The shared state of a virtual run: the cluster, the group of ranks of each communicator, and one rank's membership.

Sends are buffered: the message is copied when it is sent. Matching follows MPI: by (source, tag), in the order in which
receives were posted; messages of one source do not overtake each other. A receive from ANY gets the message that
arrives first.

Collective calls with p ranks, latency a, bandwidth b, n bytes, lg = log2 rounded up. Times count from the last rank's
arrival, and all ranks return at the same time. These calls model the MPI library's: they don't queue at the links, and
their traffic is counted by the formulas.

=========  =====================================  ==========================================
call       time                                   bytes and messages sent by one rank
=========  =====================================  ==========================================
allreduce  2(p-1) a + 2n(p-1)/p / b  (ring)       2n(p-1)/p in 2(p-1)
broadcast  lg p (a + n/b)  (binomial tree)        n to each of its children in the tree
exchange   (p-1) (a + longest/b)  (ring)          its local data p-1 times
others     lg p a  (dissemination)                nothing in lg p
=========  =====================================  ==========================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hpcdist.comm.capabilities import Failures, number_nodes
from hpcdist.comm.transfer import ANY, WIDE, Traffic
from hpcdist.comm.virtual.clock import VirtualClock, VirtualRank
from hpcdist.comm.virtual.compute import ComputeModel, describe
from hpcdist.comm.virtual.network import Network, Path, Wiring
from hpcdist.errors import CommunicationError, MismatchError


class Cluster:
    """The clock, network (`wiring`: all links) and compute model of a run, shared by all communicators."""

    def __init__(self, size: int, seed: int, network: Network, compute: ComputeModel):
        self.clock, self.wiring, self.compute = VirtualClock(size, seed), Wiring(network, size), compute
        self.description = {"network": asdict(network), "compute": describe(compute)}
        sequences = (np.random.SeedSequence(seed, spawn_key=(rank, 1)) for rank in range(size))
        self.generators = [np.random.default_rng(sequence) for sequence in sequences]


class Gathering:
    """Synchronizes a communicator's ranks for each collective call; raises MismatchError if their calls differ."""

    def __init__(self, clock: VirtualClock, ranks: list[VirtualRank]):
        self._clock, self.ranks = clock, ranks
        self.call = ""
        self.inputs: dict[int, Any] = {}  # by rank, for the ranks that have arrived
        self._waiting: dict[int, VirtualRank] = {}  # their threads
        self._results: list = []  # of the call in progress, by rank

    def synchronize(
        self, rank: int, call: str, value: Any, conclude: Callable[[list], tuple[list, float]], deadline_s: float
    ) -> Any:
        """Block until all ranks have arrived and the call's time has passed; return this rank's result.

        Args:
            rank: the calling rank, by its number in the communicator.
            call: description of the call, with everything that must be the same on all ranks.
            value: this rank's input.
            conclude: maps the inputs in rank order to the results in rank order, and the seconds that the call takes.
                Run once, by the last rank to arrive: so it must not depend on the rank.
            deadline_s: virtual seconds after which DeadlineError is raised.
        """
        if not self.inputs:
            self.call = call
        elif call != self.call:
            raise MismatchError(self._disagreement(rank, call))
        self.inputs[rank] = value
        # The last rank to arrive fills `results`, which all ranks of this call hold, and resets the attributes.
        me, results = self._clock.running(self.ranks[rank].rank), self._results
        self._waiting[rank] = me

        def start() -> None:
            if len(self.inputs) == len(self.ranks):
                inputs = [self.inputs[r] for r in range(len(self.ranks))]
                waiting, self.inputs, self._results, self._waiting = self._waiting, {}, [], {}
                concluded, duration_s = conclude(inputs)
                results.extend(concluded)
                for member in range(len(self.ranks)):  # in rank order, not in order of arrival
                    self._clock.wake(waiting[member], self._clock.now_s + duration_s)

        self._clock.block(me, self, deadline_s, start)
        return results[rank]

    def __str__(self) -> str:
        """Describe the call in progress and the missing ranks, for messages of ranks that wait."""
        missing = [str(m.rank) for r, m in enumerate(self.ranks) if r not in self.inputs]
        return f"{self.call}: rank{'s' * (len(missing) > 1)} {', '.join(missing)} missing"

    def _disagreement(self, rank: int, call: str) -> str:
        first = self.ranks[next(iter(self.inputs))]
        me = self.ranks[rank]
        return (
            f"collective calls must be the same on all ranks; got {self.call} on rank {first.rank}, "
            f"{self._clock.where(first)}, and {call} on rank {me.rank}, {self._clock.where(me)}. "
            "Make the same calls in the same order, with the same lengths and dtypes, on every rank."
        )


class Group:
    """The state that the ranks of one communicator share: `gathering` for collective calls, `arrivals` for messages.

    `members` are their world ranks. Collective calls have the latency and bandwidth of the slowest link between them.
    """

    def __init__(self, cluster: Cluster, members: list[int]):
        self.cluster, self.members = cluster, tuple(members)
        ranks = [cluster.clock.ranks[member] for member in members]
        self.gathering = Gathering(cluster.clock, ranks)
        self.arrivals = [Arrivals(rank.rank, cluster.clock) for rank in ranks]
        wiring = cluster.wiring
        self.nodes = number_nodes(wiring.nodes[member] for member in members)
        self.latency_s, self.bandwidth_bytes_s = wiring.network.slowest(self.nodes)

    def rounds_s(self, n_bytes: int = 0) -> float:
        """Return the seconds of log2 p rounds with one message of n bytes each."""
        return rounds(len(self.members)) * (self.latency_s + n_bytes / self.bandwidth_bytes_s)


class Member:
    """One rank of a group: enters, times and counts its calls.

    Args:
        rank: number in the group.
        failures: holds the deadline of blocking calls, in virtual seconds.
        traffic: counts the transfers.
    """

    def __init__(self, group: Group, rank: int, failures: Failures, traffic: Traffic):
        self.group, self.rank, self.size, self.failures = group, rank, len(group.members), failures
        self.traffic, self.clock = traffic, group.cluster.clock
        self.arrivals = group.arrivals[rank]
        self.closed = False

    @property
    def me(self) -> VirtualRank:
        """The rank's thread that runs the current call."""
        return self.clock.running(self.group.members[self.rank])

    def enter(self, *, polling: bool = False) -> None:
        """Enter a call of the communicator; each call starts with this."""
        self.clock.enter(self.me, polling=polling)
        if self.closed:
            raise CommunicationError("a communicator must not be used once it is closed. Close it after its last use.")

    @contextmanager
    def counted(self, what: str) -> Iterator[None]:
        """Context: add its virtual seconds to `communicating_s` or `waiting_s` of the traffic."""
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
        self, call: str, value: Any = None, conclude: Callable[[list], tuple[list, float]] | None = None,
        counted: str = "waiting_s",
    ) -> Any:  # fmt: skip
        """Collective. Synchronize with the other ranks, see `Gathering.synchronize`; by default a barrier.

        Args:
            counted: the counter of `Traffic` to which the time is added; messages are counted for `waiting_s` only.
        """
        self.enter()
        if conclude is None:
            conclude = self._barrier
        with self.counted(counted):
            result = self.group.gathering.synchronize(self.rank, call, value, conclude, self.failures.deadline_s)
        if counted == "waiting_s":
            self.traffic.sent(0, rounds(self.size))
        return result

    def _barrier(self, values: list) -> tuple[list, float]:
        return [None] * self.size, self.group.rounds_s()

    def describe(self, source: int, tag: int) -> str:
        """Describe the messages that a receive or a probe matches, by world rank."""
        whom = "any rank" if source == ANY else f"rank {self.group.members[source]}"
        return f"a message from {whom}, {'any tag' if tag == ANY else f'tag {tag}'}"


@dataclass(frozen=True, eq=False)
class Message:
    """A message in flight, or one that has arrived."""

    source: int
    tag: int
    itemsize: int
    data: Tensor  # bytes

    def fits(self, source: int, tag: int) -> bool:
        return source in (ANY, self.source) and tag in (ANY, self.tag)


@dataclass(eq=False)
class Receive:
    """A posted receive, and its message after arrival."""

    source: int
    tag: int
    message: Message | None = None


class Arrivals:
    """The messages that have arrived at one rank of a communicator, and its posted receives."""

    def __init__(self, owner: int, clock: VirtualClock):
        self._owner, self._clock = owner, clock
        self._waiting: VirtualRank | None = None  # the thread that is blocked
        self._arrived: list[Message] = []
        self._posted: list[Receive] = []
        self._awaited: Receive | tuple[int, int] | None = None  # the receive, or (source, tag), that it waits for

    def carry(self, message: Message, path: Path, start_s: float, duration_s: float) -> Iterator[float]:
        """Effect: transfer a message that leaves at `start_s`; give it to the first posted receive that it fits."""
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

    def block(self, awaited: Receive | tuple[int, int], awaits: str, deadline_s: float) -> None:
        """Block until a posted receive has its message, or a message with this (source, tag) has arrived."""
        self._awaited, self._waiting = awaited, self._clock.running(self._owner)
        try:
            self._clock.block(self._waiting, awaits, deadline_s)
        finally:
            self._awaited = self._waiting = None

    def _wake(self) -> None:
        if self._waiting is not None:
            self._clock.wake(self._waiting)

    def post(self, receive: Receive) -> None:
        """Give a receive the first arrived message that fits it, or keep it until one arrives."""
        receive.message = self.find(receive.source, receive.tag)
        if receive.message is None:
            self._posted.append(receive)
        else:
            self._arrived.remove(receive.message)


def sum_in_rank_order(tensors: list[Tensor]) -> Tensor:
    """Return ((x0 + x1) + x2) + ...; 16-bit floats are added in float32."""
    total = tensors[0].to(WIDE.get(tensors[0].dtype, tensors[0].dtype), copy=True)
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total.to(tensors[0].dtype)


def rounds(size: int) -> int:
    """Return log2 of the number of ranks, rounded up."""
    return (size - 1).bit_length()


def children(rank: int, root: int, size: int) -> int:
    """Return the number of a rank's children in the binomial tree of a broadcast."""
    relative = (rank - root) % size
    return sum(relative + (1 << k) < size for k in range(relative.bit_length(), rounds(size)))
