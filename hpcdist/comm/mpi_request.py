"""Transfers under way, and what a rank is blocked in."""

from __future__ import annotations

from dataclasses import dataclass

from mpi4py import MPI
from torch import Tensor

from hpcdist.comm.communicator import Request

EVERYONE, ANYONE = -1, -2  # whom a call waits for where that is no single rank


@dataclass(slots=True)
class Call:
    """What a rank is blocked in, for messages and for the watchdog.

    `peer` is a rank of the communicator, EVERYONE or ANYONE; `deadline_s` is infinite where the call itself minds it.
    """

    what: str
    peer: int
    since: float
    deadline_s: float


class MpiRequest(Request):
    """A transfer under way; keeps its buffer alive, and copies it back to the device where it was staged."""

    def __init__(self, comm, request: MPI.Request, what: str, peer: int, host: Tensor, device: Tensor | None):
        self._comm, self._request, self._what, self._peer = comm, request, what, peer
        self._host, self._device = host, device

    def done(self) -> bool:
        if self._comm.attempt(self._what, self._peer, self._request.Test):
            self._finish()
            return True
        return False

    def wait(self) -> None:
        self._comm.communicate(self._what, self._peer, self._request.Wait)
        self._finish()

    def _finish(self) -> None:
        if self._device is not None:
            self._device.copy_(self._host)
            self._device = None
