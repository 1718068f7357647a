"""What a communicator has beside its calls: the ranks' own memory, the record of what it does, and failures."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import add, sub
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from hpcdist.comm.slots import Slots
from hpcdist.comm.window import Memory, Put
from hpcdist.records.timeline import Timeline


@dataclass
class Traffic:
    """One rank's transfers, in bytes, messages and seconds, and its seconds of waiting, since the communicator exists.

    `bytes_sent` and `messages_sent` count what this rank put on the network, one-sided puts and accumulates
    included; `bytes_fetched` and `messages_fetched` count what it took by one-sided gets. Calls on a rank's own window
    move nothing and count nothing. `communicating_s` are the seconds inside calls that move data, `waiting_s` those
    spent until another rank acts (barrier, `Window.wait`, `probe`); the two don't overlap.
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
        return Traffic(*map(add, vars(self).values(), vars(other).values()))

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(*map(sub, vars(self).values(), vars(earlier).values()))


T = TypeVar("T")
_NOTHING = nullcontext()


class RankMemory(abc.ABC):
    """The memory of a communicator's ranks beside windows: who shares it, and tensors that other ranks read in place.

    Attributes:
        nodes: nodes[r] is the index of the node (shared memory) that rank r lives on; equal means the same node.
        can_attach: `attach` works; the same on all ranks.
    """

    nodes: tuple[int, ...]
    can_attach: bool

    @abc.abstractmethod
    def attach(self, tensor: Tensor) -> Memory:
        """Collective. Let other ranks get and put memory that the caller already has (same length on all).

        Works between ranks of one node whose kernel lets them read each other's memory: see `can_attach`.
        Closing it is not collective and does not synchronise: end with `barrier()` before the memory changes hands.
        """

    @abc.abstractmethod
    def put_all(self, puts: Iterable[Put]) -> None:
        """Start puts into windows of this communicator, one after the other, and then wait for all of them.

        Puts to one rank change its memory in their order. When it returns, all are complete at both ends.
        """

    def shared_zeros(self, like: Sequence[Tensor]) -> list[Tensor] | None:
        """Collective. Make zeros like flat tensors, to be attached: each as a whole, or a part, alike on all ranks.

        Where memory can be attached the other ranks have them mapped, so that they read and write them in place, twice
        to three times as fast; else they are tensors like any other. They may outlive the communicator.

        Returns:
            None where one of the tensors lies on a device.
        """
        return [self._zeros(len(flat), flat.dtype) for flat in like] if all(flat.is_cpu for flat in like) else None

    def _zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """Make one of them, shape (count,)."""
        return torch.zeros(count, dtype=dtype)

    def slots(self, n_bytes: int, call: str = "collective call") -> Slots | None:
        """Collective. Make slots of so many bytes, a multiple of 64; None where ranks share no memory.

        Args:
            call: what they are used for, by the name that messages give to a rank that waits there.
        """
        return None

    def is_shared(self, tensor: Tensor) -> bool:
        """Tell whether a tensor lies in what `shared_zeros` has made, and the other ranks have mapped it."""
        return False

    def host(self, tensor: Tensor, *, write: bool = True) -> AbstractContextManager[Tensor]:
        """Yield the tensor itself if it lies on the host, or the library can use its memory; else a copy on the host.

        For algorithms that do arithmetic between many small transfers: device memory is then staged once.

        Args:
            write: copy back at the end.
        """
        return nullcontext(tensor) if tensor.is_cpu else _copied(tensor, write)


@contextmanager
def _copied(tensor: Tensor, write: bool) -> Iterator[Tensor]:
    staged = tensor.cpu()
    yield staged
    if write:
        tensor.copy_(staged)


class Trace:
    """What is recorded of a communicator: its account of traffic, its timeline, and what the records say of the ranks.

    Attributes:
        library: the library that moves the data: its name and version, one line.
        world_ranks: the numbers that these ranks have in the job.
        virtual: the cluster of virtual ranks (network, step times), as `run.json` shows it; None on real ranks.
        traffic: bytes, messages and seconds of this rank's calls.
        timeline: events of this rank, where a timeline is written.
    """

    def __init__(
        self,
        library: str,
        world_ranks: tuple[int, ...],
        virtual: Mapping[str, Any] | None = None,
        traffic: Traffic | None = None,
    ):
        self.library, self.world_ranks, self.virtual = library, world_ranks, virtual
        self.traffic = Traffic() if traffic is None else traffic
        self.timeline: Timeline | None = None

    def span(self, name: str, category: str, **details: Any) -> AbstractContextManager[Any]:
        """Note in the timeline what is done inside the context, which yields the details; None without a timeline."""
        return _NOTHING if self.timeline is None else self.timeline.span(name, category, details)


class CallingThread(Protocol):
    """A thread beside the script's, which makes calls of a communicator."""

    @property
    def busy(self) -> bool:
        """Tell whether it has work to do for which the script's thread does not wait."""


class Failures:
    """Ranks that do not come or have died. This class is for ranks of which a death ends the job.

    Attributes:
        deadline_s: a blocking call that takes longer ends the run with a message.
        tolerant: the job goes on when a rank dies.
        living: the ranks that take part in collectives: all, less those that `shrink` found dead.
        lost: the dead, in the order in which they were found.
        collective: a context for a collective call that is made of messages, so that a rank which does not come to it
            is found as with any other one.
        threads: those beside the script's that make this communicator's calls. A rank one of whose threads still has
            work to do is not taken for one that waits for ever.
    """

    deadline_s: float
    living: tuple[int, ...]
    lost: tuple[int, ...] = ()
    tolerant: bool = False
    collective: AbstractContextManager[None] = _NOTHING

    def __init__(self, size: int, deadline_s: float):
        self.living, self.deadline_s = tuple(range(size)), deadline_s
        self.threads: list[CallingThread] = []

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

    def abandon(self) -> None:
        """Let other ranks' calls of this communicator fail, which wait for this rank: it makes none any more.

        Does nothing where a death ends the job anyway.
        """

    def retry_on_failure(self, action: Callable[[], T], *others: Failures) -> T:
        """Collective among the living. Return the result of `action`, which the others repeat where a rank dies in it.

        They `shrink` to the living before. Where deaths would end the job anyway this is `action()`.

        Args:
            action: collective on this communicator and on those of `others`; it bears being made in part before, with
                data that are incomplete, and being made twice.
            others: the failures of further communicators.

        Raises:
            CommunicationError: nobody has died, and it failed on another rank. An error of `action` here comes first.
        """
        return action()
