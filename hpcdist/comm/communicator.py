"""The seam: the protocol of communicators, all that a strategy sees of the network.

Strategies, collectives and the training loop call a communicator and the objects it makes, and nothing else, so that
the same file runs on real ranks (`comm/mpi`) and on virtual ones (`comm/virtual`). Tensors handed to the seam are flat
(one dimension) and contiguous; receiving is in place. Every dtype of torch with at most 8 bytes per element may be
sent, bfloat16 and float16 included.
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
from hpcdist.comm.transfer import ANY, TAG_LIMIT, Envelope, Neighbourhood, Request, Traffic, check_flat, check_rank
from hpcdist.comm.window import Memory, Put, Window
from hpcdist.comm.work import CallQueue
from hpcdist.errors import CommunicationError, HpcdistError

__all__ = [
    "ANY",
    "TAG_LIMIT",
    "Communicator",
    "Envelope",
    "Failures",
    "Memory",
    "Neighbourhood",
    "Platform",
    "Put",
    "RankMemory",
    "Request",
    "Trace",
    "Traffic",
    "Window",
    "check_flat",
]
T = TypeVar("T")
C = TypeVar("C", bound="Communicator")


class Communicator(abc.ABC):
    """A group of ranks that exchange tensors. Not thread-safe: one thread uses a communicator at a time."""

    rank: int
    size: int
    nodes: tuple[int, ...]  # nodes[r] is the index of the node (shared memory) that rank r lives on
    platform: Platform  # the MPI library or the virtual cluster, and the ranks' numbers in the job
    trace: Trace  # traffic and timeline
    failures: Failures  # deadlines, and the ranks that have died
    mpi: Any  # mpi4py's communicator of the same ranks, for libraries that want one; None where there is no MPI
    memory: RankMemory  # for collectives: what the ranks of a node share beside windows

    # --- point to point -------------------------------------------------------------------------------------------
    def sendrecv(self, send: Tensor, dest: int, recv: Tensor, source: int, tag: int = 0) -> None:
        """Send `send` to `dest` while receiving into `recv`, of the same length or longer, from `source`."""
        check_rank(source, self.size, "source")
        sending = self.isend(send, dest, tag)
        self.irecv(recv, source, tag).wait()
        sending.wait()

    @abc.abstractmethod
    def isend(self, tensor: Tensor, dest: int, tag: int = 0) -> Request:
        """Start sending. `tensor` must not change until the request is complete."""

    @abc.abstractmethod
    def irecv(self, tensor: Tensor, source: int = ANY, tag: int = ANY) -> Request:
        """Start receiving into `tensor` (overwritten)."""

    @abc.abstractmethod
    def probe(self, source: int = ANY, tag: int = ANY, *, block: bool = True) -> Envelope | None:
        """Describe a message that has arrived, without receiving it. With block=False, None where there is none yet."""

    # --- collective -----------------------------------------------------------------------------------------------
    @abc.abstractmethod
    def allreduce(self, tensor: Tensor) -> None:
        """Collective. Sum `tensor` over all ranks in place, by the library underneath (MPI's own)."""

    @abc.abstractmethod
    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Collective. Copy root's `tensor` into everyone's."""

    def gather(self, value: Any) -> list[Any]:
        """Collective. Return every rank's `value` in rank order, on every rank; None for the dead.

        Equal values are one object.

        Args:
            value: small, and of types that JSON has; or bytes, then on all ranks.
        """
        if isinstance(value, bytes):
            return list(self._gather(value))
        found = self._gather(json.dumps(value).encode())
        values = {data: None if data is None else json.loads(data) for data in set(found)}
        return [values[data] for data in found]

    @abc.abstractmethod
    def _gather(self, data: bytes) -> Sequence[bytes | None]:
        """Collective. Return every rank's `data`, of any length, in rank order; None for the dead."""

    def raise_on_all_ranks(self, work: Callable[[], T]) -> T:
        """Collective. Run `work` on every rank, and return its result here, once it has succeeded on all ranks.

        So an error of one rank alone (a missing file, say) leaves nobody waiting.

        Raises:
            HpcdistError: `work` has failed with one here, or else on another rank: then one of the same kind, with
                the number and the message of the first rank that failed.
        """
        result: T
        failure: HpcdistError | None = None
        try:
            result = work()
        except HpcdistError as error:
            failure = error
            # The class, or its nearest base class that is constructed from a message alone.
            kind = next(cls.__name__ for cls in type(error).__mro__ if "__init__" not in vars(cls))
        failures = self.gather(None if failure is None else [kind, str(failure)])
        if failure is not None:
            raise failure
        for rank, other in enumerate(failures):
            if other is not None:
                kind, message = other
                elsewhere: HpcdistError = getattr(errors, kind, HpcdistError)(f"on rank {rank}: {message}")
                elsewhere.elsewhere = True
                raise elsewhere
        return result

    @abc.abstractmethod
    def barrier(self) -> None:
        """Collective. Return once every rank has called it."""

    @overload
    def split(self: C, color: int, key: int = 0, *, traffic: Traffic | None = None) -> C: ...

    @overload
    def split(self: C, color: int | None, key: int = 0, *, traffic: Traffic | None = None) -> C | None: ...

    def split(self: C, color: int | None, key: int = 0, *, traffic: Traffic | None = None) -> C | None:
        """Collective. Make one communicator per colour, ranks ordered by (key, rank); None where color is None.

        `split(0)` duplicates: messages on the copy never mix with those on the original.

        Args:
            traffic: the account to which its transfers are added; by default a new one.
        """
        if color is not None and color < 0:
            raise CommunicationError(f"color must be an integer of at least 0, or None; got {color}.")
        return self._split(color, key, traffic)

    @abc.abstractmethod
    def _split(self: C, color: int | None, key: int, traffic: Traffic | None) -> C | None:
        """Do what `split` says."""

    @abc.abstractmethod
    def neighbourhood(self, sources: Sequence[int], destinations: Sequence[int]) -> Neighbourhood:
        """Collective. Prepare exchanges in which this rank receives from `sources` and sends to `destinations`.

        Each list holds different ranks, without oneself; whom one rank sends to has that one among its sources.
        """

    @abc.abstractmethod
    def window(self, count: int, dtype: torch.dtype = torch.float32) -> Window:
        """Collective. Make a window over `count` zeroed elements on this rank; `count` may differ by rank, and be 0."""

    def put_all(self, puts: Iterable[Put]) -> None:
        """Start puts into windows of this communicator, one after the other, and then wait for all of them.

        Puts to one rank change its memory in their order. When it returns, all are complete at both ends.
        """
        for window, values, rank, offset in puts:
            window.put(values, rank, offset)

    def queue(self) -> CallQueue:
        """Make a queue for calls of this communicator, which nobody else may use while they are in flight."""
        return CallQueue(self.platform.concurrent and self.size > 1)

    # --- time -----------------------------------------------------------------------------------------------------
    def compute(self, share: float = 1.0) -> float:
        """Let the time of a step's forward and backward pass go by, on virtual ranks; on real ones do nothing.

        Returns these seconds: 0.0 on real ranks, where the computation itself takes time.

        Args:
            share: of a step's time, for a pass over a part of a batch.
        """
        return 0.0

    def overlapping(self) -> AbstractContextManager[None]:
        """Let messages under way go on inside the context while this rank computes, whatever that costs."""
        return nullcontext()

    def now(self) -> float:
        """Return seconds since some fixed moment: wall clock on real ranks, virtual clock on virtual ones."""
        return time.perf_counter()

    @abc.abstractmethod
    def close(self) -> None:
        """Collective. Release what the communicator holds. Windows must be closed before."""
