"""Neighbour exchange: a rank sends a tensor to its destinations and receives one from each source, as it computes."""

from __future__ import annotations

import abc

from torch import Tensor

from hpcdist.comm.transfer import Request, check_flat
from hpcdist.errors import CommunicationError


class Neighbourhood(abc.ABC):
    """Repeated exchange of tensors with the same ranks. Made by `Communicator.neighbourhood`."""

    sources: tuple[int, ...]
    destinations: tuple[int, ...]

    def start(self, send: Tensor, received: Tensor) -> Request:
        """Collective. Start to send `send` to all destinations, and to receive a tensor like it from every source.

        Never blocks. Exchanges match in the order in which ranks start them. Until the request is complete `send`
        must not change and `received` must not be looked at. Messages: one of `send.nbytes` per destination.

        Args:
            send: flat; of one length and dtype on all ranks.
            received: flat, of len(sources) · len(send) elements, overwritten: the sources' tensors one after the
                other, in the order of `sources`.

        Raises CommunicationError where the tensors do not fit each other.
        """
        check_flat(send, "send")
        check_flat(received, "received")
        expected = len(self.sources) * send.numel()
        if received.numel() != expected or received.dtype != send.dtype:
            raise CommunicationError(
                f"received must have {expected} elements of {send.dtype}, as many as are sent for each of "
                f"{len(self.sources)} sources; got {received.numel()} of {received.dtype}. Allocate them so."
            )
        return self._start(send, received)

    @abc.abstractmethod
    def _start(self, send: Tensor, received: Tensor) -> Request:
        """Start the exchange, of tensors whose lengths have been checked."""

    @abc.abstractmethod
    def close(self) -> None:
        """Collective. Release the neighbourhood; no exchange may be under way."""
