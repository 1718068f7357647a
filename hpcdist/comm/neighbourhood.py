"""Neighbour exchange: a rank sends one tensor to some ranks and receives one from each of some, while it computes."""

from __future__ import annotations

import abc
import json
from collections.abc import Sequence

from torch import Tensor

from hpcdist.comm.communicator import Communicator, Request, check_flat
from hpcdist.errors import CommunicationError, MismatchError


class Neighbourhood(abc.ABC):
    """Whom this rank receives from and sends to. Made by `Communicator.neighbourhood`."""

    sources: tuple[int, ...]
    destinations: tuple[int, ...]

    def start(self, send: Tensor, received: Tensor) -> Request:
        """Collective. Starts to send `send` to all destinations, and to receive as much from every source.

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
        """`start`, of tensors that fit."""

    @abc.abstractmethod
    def close(self) -> None:
        """Collective. No exchange may be under way."""


class Messages(Neighbourhood):
    """By point-to-point messages: what there is where neighbours change from step to step. Made without the others.

    Args:
        comm: nobody may send other messages of tag 0 on it between these ranks.
        owned: whether to close `comm` at the end.
    """

    def __init__(self, comm: Communicator, sources: Sequence[int], destinations: Sequence[int], *, owned: bool = False):
        self.sources, self.destinations = tuple(sources), tuple(destinations)
        self._comm, self._owned = comm, owned
        # By distance: where all have the same distances nobody is sent to by two at a time.
        self._order = sorted(destinations, key=lambda dest: (dest - comm.rank) % comm.size)

    def _start(self, send: Tensor, received: Tensor) -> Request:
        n = send.numel()
        parts = [received[k * n : (k + 1) * n] for k in range(len(self.sources))]
        receiving = [self._comm.irecv(part, source, 0) for part, source in zip(parts, self.sources, strict=True)]
        return Together([*receiving, *(self._comm.isend(send, dest, 0) for dest in self._order)])

    def close(self) -> None:
        if self._owned:
            self._comm.close()


class Together(Request):
    """Several transfers as one."""

    def __init__(self, requests: Sequence[Request]):
        self._requests = requests

    def done(self) -> bool:
        return all([request.done() for request in self._requests])  # each one makes progress by being asked

    def wait(self) -> None:
        for request in self._requests:
            request.wait()


def check_graph(comm: Communicator, sources: Sequence[int], destinations: Sequence[int]) -> None:
    """Collective. Raises, on all ranks, unless these lists can be those of a neighbourhood."""
    told = comm.exchange(json.dumps([list(sources), list(destinations)]).encode())
    ranks = {rank: json.loads(told[rank]) for rank in comm.living}
    for rank, lists in ranks.items():
        for name, peers in zip(("sources", "destinations"), lists, strict=True):
            if len(set(peers)) < len(peers) or not set(peers) <= set(ranks) - {rank}:
                raise CommunicationError(
                    f"{name} must be different ranks, without oneself; got {peers} on rank {rank} of {comm.size}."
                )
    for rank, (_, peers) in ranks.items():
        expected = [peer for peer in ranks if rank in ranks[peer][0]]
        if sorted(peers) != expected:
            raise MismatchError(
                f"destinations must be the ranks that have one among their sources; got {sorted(peers)} on rank "
                f"{rank}, which is a source of {expected}. Work out both lists from the same graph."
            )
