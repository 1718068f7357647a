"""The messages that have arrived at a virtual rank, and their matching to the receives that wait for them.

Sending is buffered: the message is copied when it is posted. Matching is MPI's: by (source, tag), in the order in which
receives were posted, and messages of one source never overtake each other. Receiving from ANY takes the earliest
arrival.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcdist.comm.transfer import ANY
from hpcdist.comm.virtual.clock import VirtualClock, VirtualRank
from hpcdist.comm.virtual.network import Path


@dataclass(frozen=True, eq=False)
class Message:
    """A message that is under way, or has arrived."""

    source: int
    tag: int
    itemsize: int
    data: Tensor  # bytes

    @classmethod
    def copy_of(cls, tensor: Tensor, source: int, tag: int) -> Message:
        return cls(source, tag, tensor.itemsize, tensor.detach().clone().view(torch.uint8))

    def fits(self, source: int, tag: int) -> bool:
        return source in (ANY, self.source) and tag in (ANY, self.tag)


class Receive:
    """A posted receive, and its message once that has arrived."""

    def __init__(self, source: int, tag: int):
        self.source, self.tag = source, tag
        self.message: Message | None = None


class Arrivals:
    """The messages that have arrived at one rank of one communicator, and the receives that wait for more."""

    def __init__(self, owner: VirtualRank, clock: VirtualClock):
        self._owner, self._clock = owner, clock
        self._arrived: list[Message] = []
        self._posted: list[Receive] = []
        self._awaited: Receive | tuple[int, int] | None = None  # what its owner is blocked on

    def carry(self, message: Message, path: Path, start_s: float, duration_s: float) -> Iterator[float]:
        """Transfer a message that leaves at `start_s`, as an effect on the clock."""
        yield start_s
        yield path.into.reserve(start_s + path.latency_s, duration_s)[1]
        for receive in self._posted:
            if message.fits(receive.source, receive.tag):
                self._posted.remove(receive)
                receive.message = message
                if receive is self._awaited:
                    self._clock.wake(self._owner)
                return
        self._arrived.append(message)
        if isinstance(self._awaited, tuple) and message.fits(*self._awaited):
            self._clock.wake(self._owner)

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
        self._awaited = awaited
        try:
            self._clock.block(awaits, deadline_s)
        finally:
            self._awaited = None

    def post(self, receive: Receive) -> None:
        receive.message = self.find(receive.source, receive.tag)
        if receive.message is None:
            self._posted.append(receive)
        else:
            self._arrived.remove(receive.message)
