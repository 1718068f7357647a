"""Attributes of a communicator: shared memory for collectives, its platform, its trace, and its failures."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from hpcdist.comm.slots import Slots
from hpcdist.comm.transfer import Traffic
from hpcdist.comm.window import Memory
from hpcdist.records.timeline import Timeline

T = TypeVar("T")
DEADLINE_S = 600.0  # default limit of a blocking call
_NOTHING = nullcontext()


def number_nodes(nodes: Iterable[Any]) -> tuple[int, ...]:
    """Replace each node name by an index: 0 for the first distinct name, 1 for the second..."""
    index: dict[Any, int] = {}
    return tuple(index.setdefault(node, len(index)) for node in nodes)


@lru_cache(maxsize=8)  # one object for all virtual ranks: with a separate one each, memory would grow with their square
def _everyone(size: int) -> tuple[int, ...]:
    return tuple(range(size))


class RankMemory(abc.ABC):
    """Memory for collective algorithms: memory that the ranks of a node share, and host copies of device tensors.

    For `collectives/`; strategies use windows.

    Attributes:
        local_ranks: the ranks on this rank's node, sorted.
        can_attach: whether `attach` works; the same on all ranks.
    """

    can_attach: bool

    def __init__(self, rank: int, nodes: Sequence[int]):
        self.local_ranks = [other for other, node in enumerate(nodes) if node == nodes[rank]]

    @abc.abstractmethod
    def attach(self, tensor: Tensor) -> Memory:
        """Collective. Let other ranks get and put an existing tensor, of the same length on all ranks.

        Requires `can_attach`: ranks on one node whose kernel permits access to other processes. Closing the result is
        not collective and does not synchronize: call `barrier()` before the memory is used otherwise.
        """

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """Collective. Return a tensor of zeros, shape (count,). It, or the same slice on all ranks, suits `attach`.

        If `can_attach`, the other ranks map this memory, and read and write it in place, two to three times as fast;
        otherwise it is an ordinary tensor. It may outlive the communicator.
        """
        return torch.zeros(count, dtype=dtype)

    def slots(self, n_bytes: int, call: str = "collective call") -> Slots | None:
        """Collective. Create slots of `n_bytes` each, a multiple of 64; None if the ranks share no memory.

        Args:
            call: name of the calls that use them, for messages about a rank that waits there.
        """
        return None

    def mapped(self, tensor: Tensor) -> list[Tensor]:
        """Return all ranks' tensors at this one's place in memory from `zeros`; empty if ranks have not mapped it."""
        return []

    def host(self, tensor: Tensor, *, write: bool = True) -> AbstractContextManager[Tensor]:
        """Yield the tensor itself if it is on the host or the library can use device memory; else a copy on the host.

        For algorithms with arithmetic between many small transfers: device memory is staged only once.

        Args:
            write: copy the result back to the device at the end.
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
        library: name and version of the communication library, one line.
        world_ranks: the numbers of these ranks in the job.
        virtual: description of the virtual cluster (network, step times) for `run.json`; None on real ranks.
        concurrent: whether several threads of a rank may communicate at the same time, each on a separate communicator.
    """

    library: str
    world_ranks: tuple[int, ...]
    virtual: Mapping[str, Any] | None = None
    concurrent: bool = False


class Trace:
    """Records of a communicator's calls.

    Attributes:
        traffic: bytes, messages and seconds of this rank's calls.
        timeline: events of this rank; None unless a timeline is written.
    """

    def __init__(self, traffic: Traffic | None = None):
        self.traffic = Traffic() if traffic is None else traffic
        self.timeline: Timeline | None = None

    def span(self, name: str, category: str, **details: Any) -> AbstractContextManager[Any]:
        """Record the context as an event of the timeline; yields its details, or None without a timeline."""
        return _NOTHING if self.timeline is None else self.timeline.span(name, category, details)


class Failures:
    """Detects ranks that are late or have died. In this base class a rank's death ends the job.

    Attributes:
        deadline_s: a blocking call that takes longer ends the run with a message.
        tolerant: whether the job continues when a rank dies.
        alive: the ranks that take part in collectives: all but those that `shrink` found dead.
        lost: the dead ranks, in the order of detection.
        collective: context around a collective call that consists of messages; a missing rank is then reported as for
            any other collective call.
    """

    deadline_s: float
    alive: tuple[int, ...]
    lost: tuple[int, ...] = ()
    tolerant: bool = False
    collective: AbstractContextManager[None] = _NOTHING

    def __init__(self, size: int, deadline_s: float):
        self.alive, self.deadline_s = _everyone(size), deadline_s

    def failed(self) -> tuple[int, ...]:
        """Return the ranks known to have died. Never blocks; always empty if a death ends the job."""
        return ()

    def locate_ranks(self) -> str:
        """Describe for an error message at which line of the user's code each rank is; empty if unknown.

        May take seconds on real ranks, waiting for ranks that do not reply.
        """
        return ""

    def shrink(self) -> None:
        """Collective among the surviving ranks. Agree on the dead ranks; later collectives exclude them.

        Ranks keep their numbers; `gather` returns None for dead ranks.
        """

    def retry_on_failure(self, action: Callable[[], T], *others: Failures) -> T:
        """Collective among the surviving ranks. Run `action` and return its result; after a death `shrink` and rerun.

        If a death ends the job anyway, this is just `action()`.

        Args:
            action: collective on this communicator and the communicators of `others`. It may be interrupted with
                incomplete data, and may run twice.
            others: `failures` of further communicators that `action` uses.

        Raises:
            CommunicationError: `action` failed on another rank though none died. A local error is raised as it is.
        """
        return action()
