"""Requests of virtual ranks for messages under way."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcdist.comm.transfer import Request
from hpcdist.comm.virtual.arrivals import Receive
from hpcdist.comm.virtual.group import Member
from hpcdist.errors import CommunicationError


class SendRequest(Request):
    """A send: complete when the message has left the sender's link, received or not."""

    def __init__(self, member: Member, end_s: float):
        self._member, self._end_s = member, end_s

    def done(self) -> bool:
        self._member.enter(polling=True)
        if self._member.clock.now_s < self._end_s:
            with self._member.counted("communicating_s"):
                self._member.clock.poll(self, "the end of a send", self._end_s)
        return self._member.clock.now_s >= self._end_s

    def wait(self) -> None:
        self._member.enter()
        if self._member.clock.now_s < self._end_s:
            with self._member.counted("communicating_s"):
                self._member.clock.advance(self._end_s)


class ReceiveRequest(Request):
    """A receive. `done` or `wait` writes the tensor, which must not be read before."""

    def __init__(self, member: Member, tensor: Tensor, source: int, tag: int):
        self._member, self._arrivals = member, member.arrivals
        self._tensor: Tensor | None = tensor.detach()
        self._posted = Receive(source, tag)
        self._arrivals.post(self._posted)

    def done(self) -> bool:
        self._member.enter(polling=True)
        if self._posted.message is None:
            with self._member.counted("communicating_s"):
                self._member.clock.poll(self, self._awaits())
        if self._posted.message is None:
            return False
        self._take()
        return True

    def wait(self) -> None:
        self._member.enter()
        with self._member.counted("communicating_s"):
            self._arrivals.await_receive(self._posted, self._awaits(), self._member.failures.deadline_s)
        self._take()

    def _awaits(self) -> str:
        return self._member.describe(self._posted.source, self._posted.tag)

    def _take(self) -> None:
        message, tensor, self._tensor = self._posted.message, self._tensor, None
        if message is None or tensor is None:
            return
        if message.data.nbytes > tensor.nbytes or message.itemsize != tensor.itemsize:
            raise CommunicationError(
                f"a message must fit the tensor it is received into; got {message.data.nbytes} bytes in elements of "
                f"{message.itemsize} from rank {message.source} with tag {message.tag}, for {tensor.nbytes} bytes in "
                f"elements of {tensor.itemsize}. Lengths and dtypes must agree."
            )
        tensor.view(torch.uint8)[: message.data.nbytes].copy_(message.data)
