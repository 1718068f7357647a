"""One virtual rank in one group: the beginning, the time and the meeting of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hpcdist.comm.capabilities import Failures
from hpcdist.comm.traffic import Traffic
from hpcdist.comm.transfer import ANY
from hpcdist.comm.virtual.collectives import rounds
from hpcdist.comm.virtual.group import Group
from hpcdist.comm.virtual.network import Path
from hpcdist.errors import CommunicationError


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
