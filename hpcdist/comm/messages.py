"""Neighbour exchange by point-to-point messages, and the check of a neighbourhood's sources and destinations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transfer import Neighbourhood, Request
from hpcdist.errors import CommunicationError, MismatchError


class Messages(Neighbourhood):
    """Exchange with neighbours by point-to-point messages. Constructing it is not collective, so neighbours may change.

    Args:
        comm: no other messages with tag 0 may be sent between these ranks.
        owned: close `comm` at the end.
    """

    def __init__(self, comm: Communicator, sources: Sequence[int], destinations: Sequence[int], *, owned: bool = False):
        self._sources, self._comm, self._owned = tuple(sources), comm, owned
        # By distance: if all ranks have the same distances, no rank is the target of two concurrent sends.
        self._order = sorted(destinations, key=lambda dest: (dest - comm.rank) % comm.size)

    def _start(self, send: Tensor, received: Tensor) -> Request:
        n = send.numel()
        parts = [received[k * n : (k + 1) * n] for k in range(len(self._sources))]
        receiving = [self._comm.irecv(part, source, 0) for part, source in zip(parts, self._sources, strict=True)]
        return Requests([*receiving, *(self._comm.isend(send, dest, 0) for dest in self._order)])

    def close(self) -> None:
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
