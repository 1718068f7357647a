"""What a communicator has beside its calls: memory for collectives, what it runs on, records, and failures."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from hpcdist.comm.slots import Slots
from hpcdist.comm.transfer import Traffic
from hpcdist.comm.window import Memory
from hpcdist.records.timeline import Timeline

T = TypeVar("T")
DEADLINE_S = 600.0  # of a blocking call, by default
_NOTHING = nullcontext()


def numbered(nodes: Iterable[Any]) -> tuple[int, ...]:
    """Number nodes from 0 on, in the order in which they first come."""
    index: dict[Any, int] = {}
    return tuple(index.setdefault(node, len(index)) for node in nodes)


class RankMemory(abc.ABC):
    """The memory that collective calls use beside windows: what ranks of a node share, and copies on the host.

    Strategies leave it to `collectives/`.

    Attributes:
        local_ranks: the ranks on this rank's node, in their order.
        can_attach: `attach` works; the same on all ranks.
    """

    can_attach: bool

    def __init__(self, rank: int, nodes: Sequence[int]):
        self.local_ranks = [other for other, node in enumerate(nodes) if node == nodes[rank]]

    @abc.abstractmethod
    def attach(self, tensor: Tensor) -> Memory:
        """Collective. Let other ranks get and put memory that the caller already has (same length on all).

        Works between ranks of one node whose kernel lets them read each other's memory: see `can_attach`.
        Closing it is not collective and does not synchronise: end with `barrier()` before the memory changes hands.
        """

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """Collective. Make zeros, shape (count,), to be attached: as a whole, or a part, the same on all ranks.

        Where memory can be attached the other ranks have them mapped, so that they read and write them in place, twice
        to three times as fast; else they are a tensor like any other. They may outlive the communicator.
        """
        return torch.zeros(count, dtype=dtype)

    def slots(self, n_bytes: int, call: str = "collective call") -> Slots | None:
        """Collective. Make slots of so many bytes, a multiple of 64; None where ranks share no memory.

        Args:
            call: what they are used for, by the name that messages give to a rank that waits there.
        """
        return None

    def is_shared(self, tensor: Tensor) -> bool:
        """Tell whether a tensor lies in what `zeros` has made, and the other ranks have mapped it."""
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


@dataclass
class Platform:
    """What the ranks of a communicator run on.

    Attributes:
        library: the library that moves the data: its name and version, one line.
        world_ranks: the numbers that these ranks have in the job.
        virtual: the cluster of virtual ranks (network, step times), as `run.json` shows it; None on real ranks.
        concurrent: several threads of a rank may use communicators at the same time, each another one.
    """

    library: str
    world_ranks: tuple[int, ...]
    virtual: Mapping[str, Any] | None = None
    concurrent: bool = False


class Trace:
    """What is recorded of a communicator's calls.

    Attributes:
        traffic: bytes, messages and seconds of this rank's calls.
        timeline: events of this rank, where a timeline is written.
    """

    def __init__(self, traffic: Traffic | None = None):
        self.traffic = Traffic() if traffic is None else traffic
        self.timeline: Timeline | None = None

    def span(self, name: str, category: str, **details: Any) -> AbstractContextManager[Any]:
        """Note in the timeline what is done inside the context, which yields the details; None without a timeline."""
        return _NOTHING if self.timeline is None else self.timeline.span(name, category, details)


class Failures:
    """Ranks that do not come or have died. This class is for ranks of which a death ends the job.

    Attributes:
        deadline_s: a blocking call that takes longer ends the run with a message.
        tolerant: the job goes on when a rank dies.
        alive: the ranks that take part in collectives: all, less those that `shrink` found dead.
        lost: the dead, in the order in which they were found.
        collective: a context for a collective call that is made of messages, so that a rank which does not come to it
            is found as with any other one.
    """

    deadline_s: float
    alive: tuple[int, ...]
    lost: tuple[int, ...] = ()
    tolerant: bool = False
    collective: AbstractContextManager[None] = _NOTHING

    def __init__(self, size: int, deadline_s: float):
        self.alive, self.deadline_s = tuple(range(size)), deadline_s

    def failed(self) -> tuple[int, ...]:
        """Return the ranks that are known to have died. Never blocks; empty where a death would end the job anyway."""
        return ()

    def whereabouts(self) -> str:
        """Describe the line of the user's code at which each rank is, for an error's message; empty where unknown.

        On real ranks it takes seconds, for a rank that does not answer is waited for.
        """
        return ""

    def shrink(self) -> None:
        """Collective among the surviving ranks. Agree on who has died; collectives are the others' from here on.

        Ranks keep their numbers; `gather` gives None for the dead.
        """

    def retry_on_failure(self, action: Callable[[], T], *others: Failures) -> T:
        """Collective among the surviving ranks. Return the result of `action`, which the others repeat where a rank
        dies in it.

        They `shrink` to the surviving ranks before. Where deaths would end the job anyway this is `action()`.

        Args:
            action: collective on this communicator and on those of `others`; it bears being made in part before, with
                data that are incomplete, and being made twice.
            others: the failures of further communicators.

        Raises:
            CommunicationError: nobody has died, and it failed on another rank. An error of `action` here comes first.
        """
        return action()
