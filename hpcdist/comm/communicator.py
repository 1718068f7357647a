"""The seam: what a strategy sees of the network.

Strategies, collectives and the training loop speak to these two classes and to nothing else, so that the same file
runs on real ranks (`comm/mpi.py`) and on virtual ones (`comm/virtual.py`). Tensors handed to the seam are flat (one
dimension) and contiguous; receiving is in place. Every dtype of torch with at most 8 bytes per element may be sent,
bfloat16 and float16 included.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from hpcdist.errors import CommunicationError

if TYPE_CHECKING:
    from hpcdist.comm.neighbourhood import Neighbourhood

ANY = -1  # any source, any tag
T = TypeVar("T")
TAG_LIMIT = 1 << 15  # tags are 0 <= tag < TAG_LIMIT; every MPI offers at least that many


@dataclass
class Traffic:
    """What one rank has moved and waited for since the communicator was made. Counted where the transfer happens.

    `bytes_sent` and `messages_sent` count what this rank put on the network, one-sided puts and accumulates
    included; `bytes_fetched` and `messages_fetched` count what it took by one-sided gets; calls on a rank's own window
    move nothing and count nothing. `communicating_s` are the
    seconds inside calls that move data, `waiting_s` those spent until another rank acts (barrier, `Window.wait`,
    `probe`); the two don't overlap.
    """

    bytes_sent: int = 0
    messages_sent: int = 0
    bytes_fetched: int = 0
    messages_fetched: int = 0
    communicating_s: float = 0.0
    waiting_s: float = 0.0

    def sent(self, n_bytes: int, messages: int = 1) -> None:
        self.bytes_sent += n_bytes
        self.messages_sent += messages

    def fetched(self, n_bytes: int, messages: int = 1) -> None:
        self.bytes_fetched += n_bytes
        self.messages_fetched += messages

    def copy(self) -> Traffic:
        return Traffic(**vars(self))

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(**{k: v + getattr(other, k) for k, v in vars(self).items()})

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(**{k: v - getattr(earlier, k) for k, v in vars(self).items()})


@dataclass(frozen=True)
class Envelope:
    """What `probe` knows of a message that has arrived: its source rank, its tag and its length in bytes."""

    source: int
    tag: int
    n_bytes: int


class Request(abc.ABC):
    """A transfer under way. The tensor may be touched again once it is complete."""

    @abc.abstractmethod
    def done(self) -> bool:
        """True once the transfer is complete. Never blocks."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Blocks until the transfer is complete. Raises DeadlineError past the communicator's deadline."""


class Window(abc.ABC):
    """Memory that every rank of a communicator can read and change without its owner taking part.

    Each call is an epoch of its own (passive target): when it returns, the transfer is complete at both ends.
    `offset` counts elements. Single elements are never torn; a longer `get` that overlaps another rank's `put` may
    mix old and new elements. For a consistent read use `hpcdist.comm.snapshot`.
    """

    local: Tensor  # this rank's exposed memory, flat; others may change it at any time

    @abc.abstractmethod
    def get(self, out: Tensor, rank: int, offset: int = 0) -> None:
        """Copies `len(out)` elements of `rank`'s memory, from `offset` on, into `out` (overwritten)."""

    def read(self, rank: int, offset: int, count: int) -> Tensor:
        """`count` elements of `rank`'s memory: where they lie if that memory is mapped here, else a copy.

        Not to be written; what lies in place stays what it is only until somebody changes it there.
        """
        out = torch.empty(count, dtype=self.local.dtype)
        self.get(out, rank, offset)
        return out

    @abc.abstractmethod
    def put(self, values: Tensor, rank: int, offset: int = 0) -> None:
        """Copies `values` into `rank`'s memory from `offset` on."""

    @abc.abstractmethod
    def accumulate(self, values: Tensor, rank: int, offset: int = 0) -> None:
        """Adds `values` to `rank`'s memory from `offset` on. Atomic per element among accumulates."""

    @abc.abstractmethod
    def fetch_add(self, value: int, rank: int, offset: int = 0) -> int:
        """Adds `value` to one element of an int64 window and returns what was there before. Atomic."""

    @abc.abstractmethod
    def compare_and_swap(self, expected: int, desired: int, rank: int, offset: int = 0) -> int:
        """Writes `desired` if the int64 element equals `expected`; returns what was there before. Atomic."""

    @abc.abstractmethod
    def wait(
        self,
        predicate: Callable[[Tensor], bool],
        *,
        rank: int | None = None,
        offset: int = 0,
        count: int | None = None,
        what: str = "a change in a window",
        deadline_s: float | None = None,
    ) -> None:
        """Blocks until `predicate(elements)` holds for elements [offset, offset + count) of `rank` (default: own).

        The predicate must not communicate and must not change the tensor. `what` says in words what is awaited and
        of whom, for error messages. Past `deadline_s` (default: the communicator's) DeadlineError is raised.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Collective. Releases the memory; `local` must not be used afterwards."""


class Put(NamedTuple):
    """What `Window.put` is told, for `Communicator.put_all`."""

    window: Window
    values: Tensor
    rank: int
    offset: int


class Communicator(abc.ABC):
    """A group of ranks that exchange tensors. Not thread-safe: one thread uses a communicator at a time."""

    rank: int
    size: int
    nodes: tuple[int, ...]  # nodes[r]: index of the node (shared memory) that rank r lives on; equal = same node
    traffic: Traffic
    deadline_s: float  # a blocking call that takes longer ends the run with a message
    library: str  # what moves the data: its name and version, one line
    mpi: object = None  # mpi4py's communicator of the same ranks, for libraries that want one; None on virtual ranks
    living: tuple[int, ...]  # the ranks that take part in collectives: all, less those that `heal` found dead
    lost: tuple[int, ...] = ()  # those, in the order in which they were found
    tolerant: bool = False  # the library underneath survives a rank that dies
    concurrent: bool = False  # another thread of this rank may use another communicator at the same time

    # --- point to point -------------------------------------------------------------------------------------------
    @abc.abstractmethod
    def sendrecv(self, send: Tensor, dest: int, recv: Tensor, source: int, tag: int = 0) -> None:
        """Sends `send` to `dest` while receiving into `recv` (overwritten, same length as sent) from `source`."""

    @abc.abstractmethod
    def isend(self, tensor: Tensor, dest: int, tag: int = 0) -> Request:
        """Starts sending. `tensor` must not change until the request is complete."""

    @abc.abstractmethod
    def irecv(self, tensor: Tensor, source: int = ANY, tag: int = ANY) -> Request:
        """Starts receiving into `tensor` (overwritten)."""

    @abc.abstractmethod
    def probe(self, source: int = ANY, tag: int = ANY, *, block: bool = True) -> Envelope | None:
        """What message has arrived, without receiving it. With block=False, None where there is none yet."""

    # --- collective -----------------------------------------------------------------------------------------------
    @abc.abstractmethod
    def allreduce(self, tensor: Tensor) -> None:
        """Collective. Sums `tensor` over all ranks in place, by the library underneath (MPI's own)."""

    @abc.abstractmethod
    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Collective. Copies root's `tensor` into everyone's."""

    @abc.abstractmethod
    def exchange(self, data: bytes) -> list[bytes]:
        """Collective. Every rank's `data` (any length, small) in rank order, on every rank."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Collective. Returns once every rank has called it."""

    @abc.abstractmethod
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Collective. One new communicator per colour, ranks ordered by (key, rank); None where color is None.

        `split(0)` duplicates: messages on the copy never mix with those on the original.
        """

    @abc.abstractmethod
    def neighbourhood(self, sources: Sequence[int], destinations: Sequence[int]) -> Neighbourhood:
        """Collective. For exchanges in which this rank receives from `sources` and sends to `destinations`.

        Each list holds different ranks, without oneself; whom one rank sends to has that one among its sources.
        """

    def overlapping(self) -> AbstractContextManager[None]:
        """Inside the context, messages under way go on while this rank computes, whatever that costs."""
        return nullcontext()

    @abc.abstractmethod
    def window(self, count: int, dtype: torch.dtype = torch.float32) -> Window:
        """Collective. A window over `count` zeroed elements on this rank; `count` may differ per rank, and be 0."""

    @abc.abstractmethod
    def put_all(self, puts: Iterable[Put]) -> None:
        """Puts into windows of this communicator, begun one after the other, before any is waited for.

        Those to one rank change its memory in their order. When it returns, all are complete at both ends.
        """

    @abc.abstractmethod
    def attach(self, tensor: Tensor) -> Window:
        """Collective. A window for `get` and `put` over memory that the caller already has (same length on all).

        Works between ranks of one node whose kernel lets them read each other's memory: see `can_attach`.
        Closing it is not collective and does not synchronise: end with `barrier()` before the memory changes hands.
        """

    can_attach: bool  # the same on all ranks

    def host(self, tensor: Tensor) -> AbstractContextManager[Tensor]:
        """The tensor itself if this communicator can touch its memory; else a host copy, written back at the end.

        For algorithms that do arithmetic between many small transfers: device memory is then staged once.
        """
        return nullcontext(tensor)

    def link(self) -> tuple[float, float] | None:
        """Latency and seconds per byte of the slowest link among these ranks; None where they must be measured."""
        return None

    # --- failures -------------------------------------------------------------------------------------------------
    def failed(self) -> tuple[int, ...]:
        """Ranks that are known to have died. Never blocks; empty where a death would end the job anyway."""
        return ()

    def heal(self) -> None:
        """Collective among the living. Agrees on who has died; collectives are the others' from here on.

        Ranks keep their numbers; `exchange` gives b"" for the dead.
        """

    def surviving(self, action: Callable[[], T], *others: Communicator) -> T:
        """Collective among the living. What `action` returns; where a rank dies in it, all others heal and repeat it.

        Where deaths would end the job anyway this is `action()`.

        Args:
            action: collective on this communicator and `others`; it bears being made in part before, with data that
                are incomplete, and being made twice.

        Raises:
            CommunicationError: nobody has died, and it failed on another rank. What it raised here comes first.
        """
        return action()

    # --- time -----------------------------------------------------------------------------------------------------
    @abc.abstractmethod
    def compute(self) -> float:
        """Stands where a step's forward and backward pass run.

        Returns the seconds that the compute model drew: 0.0 on real ranks, where the computation itself takes time.
        """

    @abc.abstractmethod
    def now(self) -> float:
        """Seconds since some fixed moment: wall clock on real ranks, virtual clock on virtual ones."""

    @abc.abstractmethod
    def close(self) -> None:
        """Collective. Releases what the communicator holds. Windows must be closed before."""

    # --- shared by all implementations ----------------------------------------------------------------------------
    def check_peer(self, rank: int, name: str) -> None:
        """Raises where `rank` is no rank of this communicator."""
        if not 0 <= rank < self.size:
            raise CommunicationError(f"{name} must be a rank in 0..{self.size - 1}; got {rank}.")


def check_flat(tensor: Tensor, name: str = "tensor") -> None:
    """Raises unless `tensor` is one-dimensional and contiguous, as the seam demands."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise CommunicationError(
            f"{name} must be flat (1 dimension) and contiguous; got shape {tuple(tensor.shape)}, "
            f"strides {tensor.stride()}. Call .reshape(-1).contiguous() and copy back."
        )


def check_tag(tag: int) -> None:
    """Raises unless every MPI can carry this tag."""
    if not 0 <= tag < TAG_LIMIT:
        raise CommunicationError(f"tag must be in 0..{TAG_LIMIT - 1}; got {tag}.")
