"""Transfers of real ranks that are under way."""

from __future__ import annotations

from mpi4py import MPI
from torch import Tensor

from hpcdist.comm.mpi.calls import Calls
from hpcdist.comm.transfer import Request


class MpiRequest(Request):
    """A transfer of MPI's, which keeps its buffer alive, and copies it back to the device where it was staged."""

    def __init__(self, calls: Calls, request: MPI.Request, what: str, peer: int, host: Tensor, device: Tensor | None):
        self._calls, self._request, self._what, self._peer = calls, request, what, peer
        self._host, self._device = host, device

    def done(self) -> bool:
        if self._calls.attempt(self._what, self._peer, self._request.Test):
            self._finish()
            return True
        return False

    def wait(self) -> None:
        self._calls.communicate(self._what, self._peer, self._request.Wait)
        self._finish()

    def _finish(self) -> None:
        if self._device is not None:
            self._device.copy_(self._host)
            self._device = None
