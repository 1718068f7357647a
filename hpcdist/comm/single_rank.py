"""A communicator of one rank, for a computer or a container without an MPI library.

Nothing leaves the process. Messages of the rank to itself are copied when they are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcdist.comm.capabilities import DEADLINE_S, Failures, Platform, RankMemory, Trace
from hpcdist.comm.communicator import Communicator, Requests
from hpcdist.comm.transfer import ANY, Envelope, Request, Traffic, addable, check_flat
from hpcdist.comm.waiting import wait_until
from hpcdist.comm.window import Memory, Predicate, Window, atomic
from hpcdist.errors import CommunicationError


class SingleRankCommunicator(Communicator):
    """A communicator of one rank. Waiting for something that only another rank could do ends at the deadline."""

    rank, size, nodes, mpi = 0, 1, (0,), None

    def __init__(self, deadline_s: float = DEADLINE_S, traffic: Traffic | None = None):
        self.memory, self.failures = _SingleRankMemory(self), Failures(1, deadline_s)
        self.platform, self.trace = Platform("no MPI", (0,), concurrent=True), Trace(traffic)
        self.sent: list[_Message] = []  # not yet received, in order

    # --- point to point -------------------------------------------------------------------------------------------
    def _isend(self, tensor: Tensor, dest: int, tag: int) -> Request:
        self.sent.append(_Message(tag, tensor.detach().clone()))
        return Requests([])  # complete, as the message has been copied

    def _irecv(self, tensor: Tensor, source: int, tag: int) -> Request:
        return _Receiving(self, tensor, tag)

    def _probe(self, source: int, tag: int, block: bool) -> Envelope | None:
        if block:
            self.wait_for(lambda: self.find(tag) is not None, "a message from rank 0")
        message = self.find(tag)
        return None if message is None else Envelope(0, message.tag, message.data.nbytes)

    def find(self, tag: int) -> _Message | None:
        """Return the first message with this tag that has not been received."""
        return next((message for message in self.sent if tag in (ANY, message.tag)), None)

    def wait_for(self, ready: Callable[[], bool], what: str, deadline_s: float | None = None) -> None:
        """Block until `ready()` is true; count the time as waiting. `what` names the awaited event in errors."""
        limit_s = self.failures.deadline_s if deadline_s is None else deadline_s
        self.trace.traffic.waiting_s += wait_until(ready, limit_s, lambda: f"rank 0, alone: {what}")

    # --- collective -----------------------------------------------------------------------------------------------
    def allreduce(self, tensor: Tensor) -> None:
        check_flat(tensor)
        addable(tensor)  # raises for other dtypes, as on several ranks

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        pass

    def _gather(self, data: bytes) -> list[bytes]:
        return [data]

    def barrier(self) -> None:
        pass

    def _split(self, color: int | None, key: int, traffic: Traffic | None) -> SingleRankCommunicator | None:
        return None if color is None else SingleRankCommunicator(self.failures.deadline_s, traffic)

    def _window(self, count: int, dtype: torch.dtype) -> Window:
        return LocalWindow(self, torch.zeros(count, dtype=dtype))

    def close(self) -> None:
        self.sent.clear()


class _SingleRankMemory(RankMemory):
    """The `RankMemory` of a single rank."""

    can_attach = True

    def __init__(self, comm: SingleRankCommunicator):
        super().__init__(comm.rank, comm.nodes)
        self._comm = comm

    def attach(self, tensor: Tensor) -> Memory:
        check_flat(tensor)
        return LocalWindow(self._comm, tensor)


@dataclass(eq=False)
class _Message:
    tag: int
    data: Tensor


class _Receiving(Request):
    """A receive whose message may not have been sent yet."""

    def __init__(self, comm: SingleRankCommunicator, into: Tensor, tag: int):
        self._comm, self._into, self._tag, self._complete = comm, into.detach(), tag, False

    def done(self) -> bool:
        message = None if self._complete else self._comm.find(self._tag)
        if message is not None:
            if message.data.nbytes > self._into.nbytes or message.data.dtype != self._into.dtype:
                raise CommunicationError(
                    f"the receiving tensor must be as long as the message; got {self._into.numel()} elements of "
                    f"{self._into.dtype} for {message.data.numel()} of {message.data.dtype}."
                )
            self._comm.sent.remove(message)
            self._into[: message.data.numel()].copy_(message.data)
            self._complete = True
        return self._complete

    def wait(self) -> None:
        self._comm.wait_for(self.done, "a message from rank 0")


class LocalWindow(Window):
    """A window over the memory of the only rank."""

    def __init__(self, comm: SingleRankCommunicator, local: Tensor):
        super().__init__(local.detach(), [local.numel()], 0, comm.trace.traffic)
        self._comm = comm

    def _part(self, offset: int, tensor: Tensor) -> Tensor:
        return self.local[offset : offset + tensor.numel()]

    def _get(self, out: Tensor, rank: int, offset: int) -> None:
        out.detach().copy_(self._part(offset, out))

    def _put(self, values: Tensor, rank: int, offset: int) -> None:
        self._part(offset, values).copy_(values.detach())

    def _accumulate(self, values: Tensor, rank: int, offset: int) -> None:
        addable(self._part(offset, values)).add_(addable(values).to(self.local.device))

    def _atomic(self, what: str, rank: int, offset: int, *values: int) -> int:
        element = self.local[offset]
        before = int(element)
        element.fill_(atomic(what, before, *values))
        return before

    def _wait(
        self, predicate: Predicate, rank: int, offset: int, count: int, what: str, limit_s: float | None,
        by: Collection[int],
    ) -> None:  # fmt: skip
        elements = self.local[offset : offset + count]
        self._comm.wait_for(lambda: predicate(elements), what, limit_s)

    def close(self) -> None:
        self._release()
