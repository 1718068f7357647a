"""The ranks: init, shutdown, and process sets, by Horovod's names."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from hpcdist.comm.communicator import Communicator
from hpcdist.errors import ConfigError
from hpcdist.hvd.matching import Matcher
from hpcdist.hvd.timeline import CallTimeline
from hpcdist.session import world

T = TypeVar("T")


class ProcessSet:
    """A group of ranks with separate collective calls; `ranks` are their numbers, or an MPI communicator."""

    process_set_id: int | None = None

    def __init__(self, ranks: Sequence[int] | Any):
        self.ranks = sorted(ranks) if isinstance(ranks, Iterable) else _ranks_of(ranks)
        self.matcher: Matcher | None = None  # runs the set's calls; None on other ranks
        self.joins, self.unnamed = 0, Counter[str]()  # number of joins of all ranks; by kind: unnamed calls since

    def included(self) -> bool:
        """Return whether this rank belongs to the set."""
        return self._known(rank() in self.ranks)

    def size(self) -> int:
        return self._known(len(self.ranks))

    def rank(self) -> int:
        """Return this rank's number in the set; -1 if it does not belong to it."""
        return self._known(self.ranks.index(rank()) if rank() in self.ranks else -1)

    def _known(self, value: T) -> T:
        if self.process_set_id is None:
            raise ValueError("a process set must be known to all ranks. Call hvd.add_process_set(it) on each.")
        return value

    def next_name(self, kind: str) -> str:
        """Return a name for the next unnamed call of this kind."""
        self.unnamed[kind] += 1
        return f"{kind}.noname.{self.joins}.{self.unnamed[kind]}"

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={list(self.ranks)})"


class _State:
    """What `init` has set up."""

    comm: Communicator | None = None
    sets: dict[int, ProcessSet]
    numbers: Iterator[int]
    cycle_s: float


_state = _State()
global_process_set = ProcessSet(())


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Collective. Join all surviving ranks; safe to call again.

    Args:
        comm: numbers of the ranks that take part, or an MPI communicator; by default all.
        process_sets: process sets to add; "dynamic" has no effect, because they are always dynamic.
    """
    if _state.comm is not None:
        return
    everyone = world.init(torch_distributed=False, run=False)
    everyone.failures.shrink()
    if everyone.failures.lost:
        if comm is not None:
            raise ConfigError(f"comm must be omitted once a rank has failed; got {comm!r}. All survivors take part.")
        _state.comm = cast(Any, everyone).of_survivors()
    elif comm is None:
        _state.comm = everyone.split(0)
    else:
        chosen = list(comm) if isinstance(comm, Iterable) else _ranks_of(comm)
        # Each rank that was not chosen is alone in its group.
        _state.comm = everyone.split(0 if everyone.rank in chosen else 1 + everyone.rank)
    _state.sets, _state.numbers = {}, itertools.count()
    # Horovod's environment variables, which its users know.
    _state.cycle_s = float(os.environ.get("HOROVOD_CYCLE_TIME", 1)) / 1e3  # in milliseconds
    global_process_set.__init__(range(_state.comm.size))  # type: ignore[misc]  # scripts hold it from the start
    add_process_set(global_process_set)
    if path := os.environ.get("HOROVOD_TIMELINE"):
        start_timeline(path, os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES") == "1")
    for each in process_sets or () if process_sets != "dynamic" else ():
        add_process_set(each)


def is_initialized() -> bool:
    return _state.comm is not None


def shutdown() -> None:
    """Collective. Wait for all calls, and leave the group of ranks; `init` may be called again."""
    if _state.comm is None:
        return
    stop_timeline()
    for each in list(_state.sets.values()):
        _close(each)
    _state.sets.clear()
    _state.comm.close()
    _state.comm = None


def _close(each: ProcessSet) -> None:
    if each.matcher is not None:
        each.matcher.close()
        each.matcher = None
    each.process_set_id = None


def communicator() -> Communicator:
    """Return the ranks' communicator; raise ValueError before `init`."""
    if _state.comm is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _state.comm


# --- process sets -----------------------------------------------------------------------------------------------------
def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Collective, of all ranks. Return a registered process set; raise ValueError if its ranks are taken or invalid."""
    comm = communicator()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if any(each.ranks == added.ranks for each in _state.sets.values()):
        raise ValueError(f"a process set must have other ranks than those that are known; got {list(added.ranks)}.")
    if not set(added.ranks) <= set(range(comm.size)) or len(set(added.ranks)) < len(added.ranks):
        raise ValueError(f"ranks of a process set must be some of 0..{comm.size - 1}; got {list(added.ranks)}.")
    part = comm.split(0 if comm.rank in added.ranks else None)
    added.process_set_id = next(_state.numbers)
    added.matcher = None if part is None else Matcher(part, _state.cycle_s)
    _state.sets[added.process_set_id] = added
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; return False if it is unknown, or has all ranks. Collective, of all ranks."""
    if process_set is global_process_set or process_set.process_set_id not in _state.sets:
        return False
    del _state.sets[process_set.process_set_id]
    _close(process_set)
    return True


def matcher_of(process_set: ProcessSet) -> Matcher:
    """Return the matcher of a process set; raise ValueError if this rank does not belong to it."""
    if process_set.matcher is None:
        communicator()  # raises before `init`
        process_set.size()  # raises for a process set that was not added
        raise ValueError(
            f"the rank that calls must be in the process set; got rank {rank()} and {process_set!r}. Make the call "
            "only on its ranks."
        )
    return process_set.matcher


def _ranks_of(mpi: Any) -> list[int]:
    """Return the ranks of an MPI communicator, as numbers in the world."""
    everyone = world.init(torch_distributed=False).mpi
    if not hasattr(mpi, "Get_group") or everyone is None:
        raise ConfigError(f"ranks must be numbers, or an MPI communicator; got {mpi!r}.")
    group = mpi.Get_group()
    return sorted(type(group).Translate_ranks(group, None, everyone.Get_group()))


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start to write the times of calls to a file of rank 0, until `stop_timeline` or `shutdown`."""
    matcher = matcher_of(global_process_set)
    stop_timeline()
    if rank() == 0:
        matcher.timeline = CallTimeline(Path(file_path), mark_cycles)


def stop_timeline() -> None:
    """Close the timeline's file, if there is one."""
    matcher = matcher_of(global_process_set)
    timeline, matcher.timeline = matcher.timeline, None
    if timeline is not None:
        timeline.close()


# --- queries ----------------------------------------------------------------------------------------------------------
def rank() -> int:
    return communicator().rank


def size() -> int:
    return communicator().size


def local_rank() -> int:
    """Return this rank's number on its node."""
    return communicator().memory.local_ranks.index(rank())


def local_size() -> int:
    return len(communicator().memory.local_ranks)


def _peers() -> list[int]:
    """Return the nodes that have a rank with this rank's local number."""
    nodes, number = communicator().nodes, local_rank()
    return [node for node in dict.fromkeys(nodes) if nodes.count(node) > number]


def cross_rank() -> int:
    """Return the number of this rank's node among the nodes that have a rank with its local number."""
    return _peers().index(communicator().nodes[rank()])


def cross_size() -> int:
    """Return the number of nodes that have a rank with this rank's local number."""
    return len(_peers())


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of ranks."""
    return len(set(Counter(communicator().nodes).values())) == 1


def mpi_threads_supported() -> bool:
    """Return whether other threads may call MPI."""
    return communicator().platform.concurrent


def _constant(value: bool) -> Callable[..., bool]:
    return lambda *_: value


mpi_enabled = mpi_built = _constant(True)
gloo_enabled = gloo_built = nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = _constant(False)
