"""Messages between virtual ranks: how they match, and the requests for them.

Sending is buffered: the message is copied when it is posted, and the request is complete when the sender's link has
let go of it, whether or not anybody receives it. Matching is MPI's: by (source, tag), in the order in which receives
were posted, and messages of one source never overtake each other. Receiving from ANY takes the earliest arrival.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcdist.comm.communicator import ANY, Request
from hpcdist.comm.virtual_clock import VirtualClock, VirtualRank
from hpcdist.comm.virtual_network import Path
from hpcdist.errors import CommunicationError

if TYPE_CHECKING:
    from hpcdist.comm.virtual import VirtualCommunicator


@dataclass(frozen=True, eq=False)
class Message:
    source: int
    tag: int
    itemsize: int
    data: Tensor  # bytes

    @classmethod
    def copy_of(cls, tensor: Tensor, source: int, tag: int) -> Message:
        return cls(source, tag, tensor.itemsize, tensor.detach().clone().view(torch.uint8))

    def fits(self, source: int, tag: int) -> bool:
        return source in (ANY, self.source) and tag in (ANY, self.tag)


class Mailbox:
    """What has arrived at one rank of one communicator, and the receives that wait for more."""

    def __init__(self, owner: VirtualRank, clock: VirtualClock):
        self._owner, self._clock = owner, clock
        self._arrived: list[Message] = []
        self._posted: list[ReceiveRequest] = []
        self._awaited: ReceiveRequest | tuple[int, int] | None = None  # what its owner is blocked on

    def carry(self, message: Message, path: Path, start_s: float, duration_s: float) -> Iterator[float]:
        """The effect of a message that leaves at `start_s`."""
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
        """Blocks until a message has arrived, and leaves it there."""
        if self.find(source, tag) is None:
            self._block((source, tag), awaits, deadline_s)

    def await_receive(self, receive: ReceiveRequest, awaits: str, deadline_s: float) -> None:
        """Blocks until a receive has got its message."""
        if receive.message is None:
            self._block(receive, awaits, deadline_s)

    def _block(self, awaited: ReceiveRequest | tuple[int, int], awaits: str, deadline_s: float) -> None:
        self._awaited = awaited
        try:
            self._clock.block(awaits, deadline_s)
        finally:
            self._awaited = None

    def post(self, receive: ReceiveRequest) -> None:
        receive.message = self.find(receive.source, receive.tag)
        if receive.message is None:
            self._posted.append(receive)
        else:
            self._arrived.remove(receive.message)


class SendRequest(Request):
    def __init__(self, comm: VirtualCommunicator, end_s: float):
        self._comm, self._end_s = comm, end_s

    def done(self) -> bool:
        self._comm.enter(polling=True)
        if self._comm.now() < self._end_s:
            with self._comm.counted("communicating_s"):
                self._comm.clock.poll(self, "the end of a send", self._end_s)
        return self._comm.now() >= self._end_s

    def wait(self) -> None:
        self._comm.enter()
        if self._comm.now() < self._end_s:
            with self._comm.counted("communicating_s"):
                self._comm.clock.advance(self._end_s)


class ReceiveRequest(Request):
    """A receive. `done` or `wait` writes the tensor: before, its owner may not look at it."""

    def __init__(self, comm: VirtualCommunicator, mailbox: Mailbox, tensor: Tensor, source: int, tag: int):
        self._comm, self._mailbox = comm, mailbox
        self._tensor: Tensor | None = tensor.detach()
        self.source, self.tag = source, tag
        self.message: Message | None = None
        mailbox.post(self)

    def done(self) -> bool:
        self._comm.enter(polling=True)
        if self.message is None:
            with self._comm.counted("communicating_s"):
                self._comm.clock.poll(self, self._awaits())
        if self.message is None:
            return False
        self._take()
        return True

    def wait(self) -> None:
        self._comm.enter()
        with self._comm.counted("communicating_s"):
            self._mailbox.await_receive(self, self._awaits(), self._comm.deadline_s)
        self._take()

    def _awaits(self) -> str:
        return self._comm.describe(self.source, self.tag)

    def _take(self) -> None:
        if self._tensor is None:
            return
        message, tensor, self._tensor = self.message, self._tensor, None
        if message.data.nbytes > tensor.nbytes or message.itemsize != tensor.itemsize:
            raise CommunicationError(
                f"a message must fit the tensor it is received into; got {message.data.nbytes} bytes in elements of "
                f"{message.itemsize} from rank {message.source} with tag {message.tag}, for {tensor.nbytes} bytes in "
                f"elements of {tensor.itemsize}. Lengths and dtypes must agree."
            )
        tensor.view(torch.uint8)[: message.data.nbytes].copy_(message.data)
