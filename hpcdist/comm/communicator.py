"""The seam: the protocol of communicators, all that a strategy sees of the network.

Strategies, collectives and the training loop call a communicator and the objects it makes, and nothing else, so that
the same file runs on real ranks (`comm/mpi`) and on virtual ones (`comm/virtual`). Tensors handed to the seam are flat
(one dimension) and contiguous; receiving is in place. Every dtype of torch with at most 8 bytes per element may be
sent, bfloat16 and float16 included.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from hpcdist import errors
from hpcdist.comm.neighbourhood import Neighbourhood
from hpcdist.comm.traffic import Traffic
from hpcdist.comm.transfer import (
    ANY,
    TAG_LIMIT,
    Envelope,
    Request,
    check_flat,
    check_rank,
    check_tag,
)
from hpcdist.comm.window import Memory, Put, Window
from hpcdist.errors import HpcdistError
from hpcdist.records.timeline import Timeline

__all__ = [
    "ANY",
    "TAG_LIMIT",
    "Communicator",
    "Envelope",
    "Memory",
    "Neighbourhood",
    "Put",
    "Request",
    "Traffic",
    "Window",
    "check_flat",
    "check_tag",
]
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_NOTHING = nullcontext()


class Communicator(abc.ABC):
    """A group of ranks that exchange tensors. Not thread-safe: one thread uses a communicator at a time."""

    rank: int
    size: int
    nodes: tuple[int, ...]  # nodes[r]: index of the node (shared memory) that rank r lives on; equal = same node
    traffic: Traffic
    library: str  # the library that moves the data: its name and version, one line
    mpi: Any = None  # mpi4py's communicator of the same ranks, for libraries that want one; None on virtual ranks
    virtual: Mapping[str, Any] | None = None  # the cluster of virtual ranks: network, step times; None on real ones
    living: tuple[int, ...]  # the ranks that take part in collectives: all, less those that `shrink` found dead
    lost: tuple[int, ...] = ()  # those, in the order in which they were found
    tolerant: bool = False  # the library underneath survives a rank that dies
    concurrent: bool = False  # another thread of this rank may use another communicator at the same time
    world_ranks: tuple[int, ...]  # the numbers that these ranks have in the job
    timeline: Timeline | None = None  # of what this rank does, where one is written

    # Set when a communicator is made, and handed on to those that are split from it.
    deadline_s: float  # a blocking call that takes longer ends the run with a message
    internode: str | None = None  # how windows reach other nodes: `tcp` or `rma`; None where there are none
    device_aware: bool = False  # the library is given device memory itself

    # --- point to point -------------------------------------------------------------------------------------------
    @abc.abstractmethod
    def sendrecv(self, send: Tensor, dest: int, recv: Tensor, source: int, tag: int = 0) -> None:
        """Send `send` to `dest` while receiving into `recv` (overwritten, same length as sent) from `source`."""

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

    @abc.abstractmethod
    def exchange(self, data: bytes) -> list[bytes]:
        """Collective. Return every rank's `data` (any length, small) in rank order, on every rank; b"" for the dead.

        `gather` is made of it; call that.
        """

    def gather(self, value: Any) -> list[Any]:
        """Collective. Return every rank's `value` (small; of types that JSON has) in rank order; None for the dead."""
        return [json.loads(data) if data else None for data in self.exchange(json.dumps(value).encode())]

    def together(self, work: Callable[[], T]) -> T:
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
        failures = self.gather(None if failure is None else [_kind(failure), str(failure)])
        if failure is not None:
            raise failure
        for rank, other in enumerate(failures):
            if other is not None:
                kind, message = other
                raise getattr(errors, kind, HpcdistError)(f"on rank {rank}: {message}")
        return result

    @abc.abstractmethod
    def barrier(self) -> None:
        """Collective. Return once every rank has called it."""

    @overload
    def split(self, color: int, key: int = 0) -> Communicator: ...

    @overload
    def split(self, color: int | None, key: int = 0) -> Communicator | None: ...

    @abc.abstractmethod
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Collective. Make one communicator per colour, ranks ordered by (key, rank); None where color is None.

        `split(0)` duplicates: messages on the copy never mix with those on the original.
        """

    @abc.abstractmethod
    def neighbourhood(self, sources: Sequence[int], destinations: Sequence[int]) -> Neighbourhood:
        """Collective. Prepare exchanges in which this rank receives from `sources` and sends to `destinations`.

        Each list holds different ranks, without oneself; whom one rank sends to has that one among its sources.
        """

    def overlapping(self) -> AbstractContextManager[None]:
        """Let messages under way go on inside the context while this rank computes, whatever that costs."""
        return nullcontext()

    @abc.abstractmethod
    def window(self, count: int, dtype: torch.dtype = torch.float32) -> Window:
        """Collective. Make a window over `count` zeroed elements on this rank; `count` may differ by rank, and be 0."""

    @abc.abstractmethod
    def put_all(self, puts: Iterable[Put]) -> None:
        """Start puts into windows of this communicator, one after the other, and then wait for all of them.

        Puts to one rank change its memory in their order. When it returns, all are complete at both ends.
        """

    @abc.abstractmethod
    def attach(self, tensor: Tensor) -> Memory:
        """Collective. Let other ranks get and put memory that the caller already has (same length on all).

        Works between ranks of one node whose kernel lets them read each other's memory: see `can_attach`.
        Closing it is not collective and does not synchronise: end with `barrier()` before the memory changes hands.
        """

    can_attach: bool  # the same on all ranks

    def shared_zeros(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Collective. Make a zeroed tensor, shape (count,), to be attached: as a whole, or a part, alike on all ranks.

        Where memory can be attached the other ranks have it mapped, so that they read and write it in place, twice to
        three times as fast; else it is a tensor like any other. It may outlive the communicator.
        """
        return torch.zeros(count, dtype=dtype)

    def is_shared(self, tensor: Tensor) -> bool:
        """Tell whether a tensor lies in what `shared_zeros` has made, and the other ranks have mapped it."""
        return False

    def host(self, tensor: Tensor) -> AbstractContextManager[Tensor]:
        """Yield the tensor itself if this communicator can use its memory; else a host copy, written back at the end.

        For algorithms that do arithmetic between many small transfers: device memory is then staged once.
        """
        return nullcontext(tensor)

    def link(self) -> tuple[float, float] | None:
        """Return latency and seconds per byte of the slowest link among these ranks; None: they must be measured."""
        return None

    # --- failures -------------------------------------------------------------------------------------------------
    def failed(self) -> tuple[int, ...]:
        """Return the ranks that are known to have died. Never blocks; empty where a death would end the job anyway."""
        return ()

    def whereabouts(self) -> str:
        """Describe the line of the user's code at which each rank is, for an error's message; empty where unknown.

        On real ranks it takes seconds, for a rank that does not answer is waited for.
        """
        return ""

    def shrink(self) -> None:
        """Collective among the living. Agree on who has died; collectives are the others' from here on.

        Ranks keep their numbers; `gather` gives None for the dead.
        """

    def retry_on_failure(self, action: Callable[[], T], *others: Communicator) -> T:
        """Collective among the living. Return the result of `action`, which the others repeat where a rank dies in it.

        They `shrink` to the living before. Where deaths would end the job anyway this is `action()`.

        Args:
            action: collective on this communicator and `others`; it bears being made in part before, with data that
                are incomplete, and being made twice.

        Raises:
            CommunicationError: nobody has died, and it failed on another rank. An error of `action` here comes first.
        """
        return action()

    # --- time -----------------------------------------------------------------------------------------------------
    @abc.abstractmethod
    def compute(self, share: float = 1.0) -> float:
        """Let the time of a step's forward and backward pass go by, on virtual ranks; on real ones do nothing.

        Returns these seconds: 0.0 on real ranks, where the computation itself takes time.

        Args:
            share: of a step's time, for a pass over a part of a batch.
        """

    @abc.abstractmethod
    def now(self) -> float:
        """Return seconds since some fixed moment: wall clock on real ranks, virtual clock on virtual ones."""

    @abc.abstractmethod
    def close(self) -> None:
        """Collective. Release what the communicator holds. Windows must be closed before."""

    # --- timeline -------------------------------------------------------------------------------------------------
    def span(self, name: str, category: str, **details: Any) -> AbstractContextManager[Any]:
        """Note in the timeline what is done inside the context, which yields the details; None without a timeline."""
        return _NOTHING if self.timeline is None else self.timeline.span(name, category, details)

    def noted(self, name: str, category: str, function: F, describe: Callable[..., dict[str, Any]] | None = None) -> F:
        """Return a function whose calls the timeline notes; `function` itself without one.

        Args:
            describe: makes the details of a call from its arguments.
        """
        return function if self.timeline is None else self.timeline.noted(name, category, function, describe)

    # --- shared by all implementations ----------------------------------------------------------------------------
    def check_peer(self, rank: int, name: str) -> None:
        """Check that `rank` is a rank of this communicator; raise CommunicationError otherwise."""
        check_rank(rank, self.size, name)


def _kind(error: HpcdistError) -> str:
    """Name the class of an error, or its nearest base class that is constructed from a message alone."""
    return next(cls.__name__ for cls in type(error).__mro__ if "__init__" not in vars(cls))
