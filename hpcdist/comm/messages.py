"""Exchange with neighbours by point-to-point messages, and the check of a neighbourhood's sources and destinations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from hpcdist.comm.transfer import Request, check_flat
from hpcdist.errors import CommunicationError, MismatchError

if TYPE_CHECKING:  # a communicator creates neighbourhoods
    from hpcdist.comm.communicator import Communicator


class Neighbourhood:
    """Repeated exchange of tensors with the same ranks. Constructing it is not collective, so neighbours may change.

    Args:
        comm: no other messages with tag 0 may be sent between these ranks.
        owned: close `comm` at the end.
    """

    def __init__(self, comm: Communicator, sources: Sequence[int], destinations: Sequence[int], *, owned: bool = False):
        self._sources, self._comm, self._owned = tuple(sources), comm, owned
        # By distance: if all ranks have the same distances, no rank is the target of two concurrent sends.
        self._order = sorted(destinations, key=lambda dest: (dest - comm.rank) % comm.size)

    def start(self, send: Tensor, received: Tensor) -> Request:
        """Collective. Start sending `send` to all destinations, and receiving a tensor of equal size from every source.

        Never blocks. Exchanges match in the order in which ranks start them. Until the request is complete do not
        change `send` or read `received`. Messages: one of `send.nbytes` per destination.

        Args:
            send: flat; of one length and dtype on all ranks.
            received: flat, of len(sources) · len(send) elements, overwritten: the sources' tensors concatenated in
                the order of `sources`.

        Raises:
            CommunicationError: `received` has the wrong length or dtype.

        Example:
            >>> left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
            >>> neighbours = comm.neighbourhood(sources=[left], destinations=[right])
            >>> received = torch.empty(4)
            >>> neighbours.start(torch.ones(4), received).wait()
        """
        check_flat(send, "send")
        check_flat(received, "received")
        n = send.numel()
        expected = len(self._sources) * n
        if received.numel() != expected or received.dtype != send.dtype:
            raise CommunicationError(
                f"received must have {expected} elements of {send.dtype} ({n} for each of {len(self._sources)} "
                f"sources); got {received.numel()} of {received.dtype}. Allocate it so."
            )
        receiving = [self._comm.irecv(received[k * n :][:n], source, 0) for k, source in enumerate(self._sources)]
        return Requests([*receiving, *(self._comm.isend(send, dest, 0) for dest in self._order)])

    def close(self) -> None:
        """Collective if `owned`. Release the neighbourhood; no exchange may be in flight."""
        if self._owned:
            self._comm.close()


class Requests(Request):
    """Several transfers as one request."""

    def __init__(self, requests: Sequence[Request]):
        self._requests = requests

    def done(self) -> bool:
        return all([request.done() for request in self._requests])  # a list: `done` makes each request progress

    def wait(self) -> None:
        for request in self._requests:
            request.wait()


def check_graph(comm: Communicator, sources: Sequence[int], destinations: Sequence[int]) -> None:
    """Collective. Check that the sources and destinations of all ranks match; raise on all ranks otherwise."""
    gathered = comm.gather([list(sources), list(destinations)])
    alive_lists = {rank: gathered[rank] for rank in comm.failures.alive}
    for rank, lists in alive_lists.items():
        for name, peers in zip(("sources", "destinations"), lists, strict=True):
            if len(set(peers)) < len(peers) or not set(peers) <= set(alive_lists) - {rank}:
                raise CommunicationError(
                    f"{name} must be distinct ranks other than the rank itself; got {peers} on rank {rank} of "
                    f"{comm.size}."
                )
    for rank, (_, peers) in alive_lists.items():
        expected = [peer for peer in alive_lists if rank in alive_lists[peer][0]]
        if sorted(peers) != expected:
            raise MismatchError(
                f"destinations of rank {rank} must be the ranks that have rank {rank} as a source, {expected}; got "
                f"{sorted(peers)}. Compute both lists from the same graph."
            )
