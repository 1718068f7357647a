"""The interface of communicators: everything that a strategy uses of the network.

Strategies, collectives and the training loop communicate only through a communicator and the objects it creates, so
the same code runs on real ranks (`comm/mpi`) and on virtual ones (`comm/virtual`). Tensors must be flat (one dimension)
and contiguous; receives are in place. Every dtype of torch with at most 8 bytes per element may be sent, bfloat16 and
float16 included.
"""

from __future__ import annotations

import abc
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from hpcdist import errors
from hpcdist.comm.capabilities import Failures, Platform, RankMemory, Trace
from hpcdist.comm.transfer import (
    ANY,
    TAG_LIMIT,
    Envelope,
    Request,
    Traffic,
    check_flat,
    check_rank,
    check_source_and_tag,
    check_tag,
)
from hpcdist.comm.window import Memory, Put, Window
from hpcdist.comm.work import CallQueue
from hpcdist.errors import CommunicationError, HpcdistError, MismatchError

__all__ = [
    "ANY", "TAG_LIMIT", "Communicator", "Envelope", "Failures", "Memory", "Neighbourhood", "Platform", "Put",
    "RankMemory", "Request", "Trace", "Traffic", "Window", "check_flat",
]  # fmt: skip
T = TypeVar("T")
C = TypeVar("C", bound="Communicator")


class Communicator(abc.ABC):
    """A group of ranks that exchange tensors. Not thread-safe: one thread uses a communicator at a time.

    Example:
        >>> total = torch.ones(3) * comm.rank
        >>> comm.allreduce(total)
        >>> total
        tensor([1., 1., 1.])
    """

    rank: int
    size: int
    nodes: tuple[int, ...]  # nodes[r]: index of the node (shared memory) of rank r
    platform: Platform  # the MPI library or the virtual cluster, and the world ranks
    trace: Trace  # traffic and timeline
    failures: Failures  # deadlines, and the ranks that died
    mpi: Any  # mpi4py's communicator of the same ranks, for other libraries; None without MPI
    memory: RankMemory  # for collectives: memory that the ranks of a node share, besides windows

    # --- point to point -------------------------------------------------------------------------------------------
    def sendrecv(self, send: Tensor, dest: int, recv: Tensor, source: int, tag: int = 0) -> None:
        """Send `send` to `dest` while receiving into `recv`, which may be longer than the message, from `source`."""
        check_flat(send, "send")
        check_flat(recv, "recv")
        check_rank(dest, self.size, "dest")
        check_rank(source, self.size, "source")
        check_tag(tag)
        self._sendrecv(send, dest, recv, source, tag)

    def _sendrecv(self, send: Tensor, dest: int, recv: Tensor, source: int, tag: int) -> None:
        """Implement `sendrecv`; here and below arguments have been checked."""
        sending = self._isend(send, dest, tag)
        self._irecv(recv, source, tag).wait()
        sending.wait()

    def isend(self, tensor: Tensor, dest: int, tag: int = 0) -> Request:
        """Start sending. `tensor` must not change until the request is complete.

        Example:
            >>> received, peer = torch.empty(2), 1 - comm.rank
            >>> sending = comm.isend(torch.ones(2), dest=peer, tag=3)
            >>> comm.irecv(received, source=peer, tag=3).wait()
            >>> sending.wait()
        """
        check_flat(tensor)
        check_rank(dest, self.size, "dest")
        check_tag(tag)
        return self._isend(tensor, dest, tag)

    @abc.abstractmethod
    def _isend(self, tensor: Tensor, dest: int, tag: int) -> Request:
        """Implement `isend`."""

    def irecv(self, tensor: Tensor, source: int = ANY, tag: int = ANY) -> Request:
        """Start receiving into `tensor` (overwritten)."""
        check_flat(tensor)
        check_source_and_tag(source, tag, self.size)
        return self._irecv(tensor, source, tag)

    @abc.abstractmethod
    def _irecv(self, tensor: Tensor, source: int, tag: int) -> Request:
        """Implement `irecv`."""

    def probe(self, source: int = ANY, tag: int = ANY, *, block: bool = True) -> Envelope | None:
        """Describe a message that has arrived, without receiving it. With block=False: None if there is none yet."""
        check_source_and_tag(source, tag, self.size)
        return self._probe(source, tag, block)

    @abc.abstractmethod
    def _probe(self, source: int, tag: int, block: bool) -> Envelope | None:
        """Implement `probe`."""

    # --- collective -----------------------------------------------------------------------------------------------
    @abc.abstractmethod
    def allreduce(self, tensor: Tensor) -> None:
        """Collective. Sum `tensor` over all ranks in place, by the MPI library's all-reduce."""

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Collective. Copy root's `tensor` to all ranks."""
        check_flat(tensor)
        check_rank(root, self.size, "root")
        self._broadcast(tensor, root)

    @abc.abstractmethod
    def _broadcast(self, tensor: Tensor, root: int) -> None:
        """Implement `broadcast`."""

    def gather(self, value: Any) -> list[Any]:
        """Collective. Return every rank's `value` in rank order, on every rank; None for ranks that died.

        Args:
            value: a small value that JSON can represent; or bytes, if it is bytes on all ranks. Ranks with equal values
                share one object in the list.

        Example:
            >>> comm.gather({"loss": 0.5 + comm.rank})
            [{'loss': 0.5}, {'loss': 1.5}]
        """
        if isinstance(value, bytes):
            return list(self._gather(value))
        encoded = self._gather(json.dumps(value).encode())
        distinct = dict.fromkeys(encoded)
        decoded = json.loads(b"[%s]" % b",".join(data or b"null" for data in distinct))  # much faster than one by one
        values = dict(zip(distinct, decoded))
        return [values[data] for data in encoded]

    @abc.abstractmethod
    def _gather(self, data: bytes) -> Sequence[bytes | None]:
        """Collective. Return every rank's `data`, of any length, in rank order; None for ranks that died."""

    def raise_on_all_ranks(self, work: Callable[[], T]) -> T:
        """Collective. Run `work` on every rank; return its local result if it succeeded on all ranks, else raise.

        So an error on a single rank (a missing file, say) leaves no other rank waiting.

        Raises:
            HpcdistError: `work` raised it on this rank; or it failed on another rank: an error of the same class, with
                the number and the message of the first rank that failed.

        Example:
            >>> comm.raise_on_all_ranks(lambda: comm.rank + 1)
            1
        """
        result: T
        failure: HpcdistError | None = None
        try:
            result = work()
        except HpcdistError as error:
            failure = error
            # Other ranks raise this class, or its nearest base class without an `__init__`: it needs only a message.
            kind = next(cls.__name__ for cls in type(error).__mro__ if "__init__" not in vars(cls))
        failures = self.gather(None if failure is None else [kind, str(failure)])
        if failure is not None:
            raise failure
        for rank, reported in enumerate(failures):
            if reported is not None:
                kind, message = reported
                remote: HpcdistError = getattr(errors, kind, HpcdistError)(f"on rank {rank}: {message}")
                remote.on_other_rank = True
                raise remote
        return result

    @abc.abstractmethod
    def barrier(self) -> None:
        """Collective. Wait until every rank has called it."""

    @overload
    def split(self: C, color: int, key: int = 0, *, traffic: Traffic | None = None) -> C: ...

    @overload
    def split(self: C, color: int | None, key: int = 0, *, traffic: Traffic | None = None) -> C | None: ...

    def split(self: C, color: int | None, key: int = 0, *, traffic: Traffic | None = None) -> C | None:
        """Collective. Create one communicator per color, ranks ordered by (key, rank); None where color is None.

        `split(0)` duplicates the communicator: messages on the copy never mix with messages on the original.

        Args:
            color: ranks with the same number form one communicator.
            traffic: counts its transfers; by default a new `Traffic`.

        Example on 4 ranks:
            >>> half = comm.split(color=comm.rank // 2)
            >>> half.size
            2
        """
        if color is not None and color < 0:
            raise CommunicationError(f"color must be an integer of at least 0, or None; got {color}.")
        return self._split(color, key, traffic)

    @abc.abstractmethod
    def _split(self: C, color: int | None, key: int, traffic: Traffic | None) -> C | None:
        """Implement `split`; `color` has been checked."""

    def neighbourhood(self, sources: Sequence[int], destinations: Sequence[int]) -> Neighbourhood:
        """Collective. Prepare exchanges in which this rank receives from `sources` and sends to `destinations`.

        Both lists hold distinct ranks, without this rank. If rank a sends to rank b, then a must be a source of b.
        """
        _check_graph(self, sources, destinations)
        channel = self.split(0, traffic=self.trace.traffic)  # no other messages are sent on it
        return Neighbourhood(channel, sources, destinations, owned=True)

    def window(self, count: int, dtype: torch.dtype = torch.float32) -> Window:
        """Collective. Create a window of `count` elements, all 0, on this rank; `count` may differ by rank, or be 0.

        Example:
            >>> counter = comm.window(1, torch.int64)
            >>> before = counter.fetch_add(1, rank=0)
            >>> counter.wait(lambda values: bool(values[0] == comm.size), rank=0)
            >>> counter.close()
        """
        if count < 0:
            raise CommunicationError(f"count of a window must be at least 0; got {count}.")
        return self._window(count, dtype)

    @abc.abstractmethod
    def _window(self, count: int, dtype: torch.dtype) -> Window:
        """Implement `window`."""

    def put_all(self, puts: Iterable[Put]) -> None:
        """Start all puts into windows of this communicator, then wait for them; complete at both ends on return.

        Puts to the same rank change its memory in their order.
        """
        for window, values, rank, offset in puts:
            window.put(values, rank, offset)

    def queue(self) -> CallQueue:
        """Create a queue of calls on this communicator; do not use the communicator directly while they run."""
        return CallQueue(self.platform.concurrent and self.size > 1)

    # --- time -----------------------------------------------------------------------------------------------------
    def compute(self, share: float = 1.0) -> float:
        """Advance the virtual clock by a step's forward and backward pass; do nothing on real ranks.

        Returns these seconds: 0.0 on real ranks, where the computation itself takes time.

        Args:
            share: fraction of a step's time, for a pass over a part of a batch.
        """
        return 0.0

    def overlapping(self) -> AbstractContextManager[None]:
        """Context in which messages in flight make progress while this rank computes, even if that costs CPU time."""
        return nullcontext()

    def now(self) -> float:
        """Return seconds since a fixed moment: wall clock on real ranks, virtual clock on virtual ranks."""
        return time.perf_counter()

    @abc.abstractmethod
    def close(self) -> None:
        """Collective. Release the communicator's resources. Windows must be closed before."""


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


def _check_graph(comm: Communicator, sources: Sequence[int], destinations: Sequence[int]) -> None:
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
