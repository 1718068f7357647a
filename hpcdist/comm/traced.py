"""A communicator that notes its calls in a timeline: around one of any kind, and with it around what that one makes.

Without a timeline nothing of this is there, and calls cost what they cost.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcdist.comm.clocks import ahead_of_first
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.neighbourhood import Neighbourhood
from hpcdist.comm.transfer import ANY, Envelope, Request
from hpcdist.comm.window import Memory, Put, Window
from hpcdist.errors import ConfigError
from hpcdist.records.merged_timeline import RankTimeline, merge_timelines
from hpcdist.records.timeline import MOST, MOST_OF_ALL, Details, EventSpan, Timeline

MESSAGE, WINDOW, COLLECTIVE, WAIT = "message", "window", "collective", "wait"  # categories


def begin_timeline(comm: Communicator, path: Path, most: int | None = None) -> Communicator:
    """Collective. Return a communicator of the same ranks that notes its calls; measures the ranks' clocks.

    Each rank writes a file beside `path`, until `end_timeline` makes one of them.

    Args:
        most: events of a rank in its file; by default 200,000, and with many ranks a million of all together.

    Raises:
        ConfigError: the communicator has a timeline.
        OutputError: a file can't be written; on all ranks alike.
    """
    if comm.timeline is not None:
        raise ConfigError(f"timeline must be begun once; got one already, {comm.timeline.path}. End it first.")
    most = min(MOST, MOST_OF_ALL // comm.size) if most is None else most
    timeline = comm.together(lambda: Timeline(path, comm.rank, comm.now, most))
    _look_at_clock(comm, timeline)
    return TracedCommunicator(comm, timeline)


def end_timeline(comm: Communicator) -> None:
    """Collective among the living. Merge the timelines of all ranks into one file.

    Raises:
        OutputError: it can't be written; on all ranks alike.
    """
    timeline = comm.timeline
    if timeline is None:
        raise ConfigError("timeline must be begun before it is ended; got none. Call begin_timeline first.")
    if not comm.lost:  # else clocks are taken to go at one speed
        _look_at_clock(comm, timeline)
    timeline.close()
    name = f"rank {comm.rank} ({timeline.role + ', ' if timeline.role else ''}host {platform.node()})"
    own = RankTimeline(
        rank=comm.rank, name=name, clock=timeline.clock, error_s=timeline.error_s, left_out=timeline.left_out
    )
    found = [RankTimeline(**one) for one in comm.gather(own.model_dump()) if one is not None]
    seconds = "real" if comm.virtual is None else "virtual"
    first = comm.rank == comm.living[0]
    comm.together(lambda: merge_timelines(timeline.path, found, seconds=seconds) if first else None)


def _look_at_clock(comm: Communicator, timeline: Timeline) -> None:
    """Collective. Measure how far this rank's clock is ahead of the first's."""
    ahead = ahead_of_first(comm, comm.now)
    timeline.clock.append((comm.now(), ahead.seconds))
    timeline.error_s = max(timeline.error_s, ahead.error_s)


class TracedCommunicator(Communicator):
    """Note the calls of `comm` in `timeline`. Ranks are named by their numbers in the job.

    Args:
        name: of the communicator, the same on all of its ranks.
    """

    def __init__(self, comm: Communicator, timeline: Timeline, name: str = "all"):
        comm.timeline = self.timeline = timeline
        self._comm, self._name, self._splits = comm, name, 0
        for constant in ("rank", "size", "nodes", "library", "mpi", "tolerant", "concurrent", "can_attach"):
            setattr(self, constant, getattr(comm, constant))
        self.world_ranks, self.virtual = comm.world_ranks, comm.virtual
        self._calls = self._lost = 0
        self._messages: Counter[tuple[int, int, int]] = Counter()
        self._numbers_receives = True

    def __getattr__(self, name: str) -> Any:
        if name == "_comm":
            raise AttributeError(name)
        return getattr(self._comm, name)  # what only some communicators have

    # --- point to point -------------------------------------------------------------------------------------------
    def sendrecv(self, send: Tensor, dest: int, recv: Tensor, source: int, tag: int = 0) -> None:
        sent, received = self._sent(send, dest, tag), self._received(source, tag)
        with self.timeline.span("send and receive", MESSAGE, sent | received):
            self._comm.sendrecv(send, dest, recv, source, tag)

    def isend(self, tensor: Tensor, dest: int, tag: int = 0) -> Request:
        with self.timeline.span("send", MESSAGE, self._sent(tensor, dest, tag)):
            request = self._comm.isend(tensor, dest, tag)
        return TracedRequest(self.timeline, request, "wait for a send", {"to": self._number(dest)})

    def irecv(self, tensor: Tensor, source: int = ANY, tag: int = ANY) -> Request:
        request = self._comm.irecv(tensor, source, tag)
        return TracedRequest(self.timeline, request, "receive", self._received(source, tag))

    def probe(self, source: int = ANY, tag: int = ANY, *, block: bool = True) -> Envelope | None:
        if not block:
            return self._comm.probe(source, tag, block=False)
        with self.timeline.span("wait for a message", WAIT) as details:
            envelope = self._comm.probe(source, tag)
            if envelope is not None:
                details["from"] = self._number(envelope.source)
            return envelope

    def _sent(self, tensor: Tensor, dest: int, tag: int) -> Details:
        message = self._message(self.rank, dest, tag)
        return {"to": self._number(dest), "bytes": tensor.nbytes, "sent": message}

    def _received(self, source: int, tag: int) -> Details:
        if source == ANY or tag == ANY:
            self._numbers_receives = False  # from here on: which message it took is not known
        if not self._numbers_receives:
            return {} if source == ANY else {"from": self._number(source)}
        return {"from": self._number(source), "received": self._message(source, self.rank, tag)}

    def _message(self, source: int, dest: int, tag: int) -> str:
        """Name the next message from one rank to another; those of one tag do not overtake each other."""
        key = source, dest, tag
        self._messages[key] += 1
        return f"{self._name}: {source} to {dest}, tag {tag}, message {self._messages[key]}"

    def _number(self, rank: int) -> int:
        return self.world_ranks[rank] if 0 <= rank < self.size else rank  # a wrong one is refused by the call itself

    # --- collective -----------------------------------------------------------------------------------------------
    def allreduce(self, tensor: Tensor) -> None:
        with self._call("all-reduce (MPI's own)", bytes=tensor.nbytes):
            self._comm.allreduce(tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        with self._call("broadcast", bytes=tensor.nbytes, root=self._number(root)):
            self._comm.broadcast(tensor, root)

    def exchange(self, data: bytes) -> list[bytes]:
        with self._call("gather", bytes=len(data)):
            return self._comm.exchange(data)

    def barrier(self) -> None:
        with self._call("barrier", WAIT):
            self._comm.barrier()

    def split(self, color: int | None, key: int = 0) -> Any:
        self._splits += 1
        with self._call("split"):
            made = self._comm.split(color, key)
        return None if made is None else TracedCommunicator(made, self.timeline, f"{self._name}/{self._splits}.{color}")

    def neighbourhood(self, sources: Sequence[int], destinations: Sequence[int]) -> Neighbourhood:
        return TracedNeighbourhood(self, self._comm.neighbourhood(sources, destinations))

    def window(self, count: int, dtype: torch.dtype = torch.float32) -> Window:
        return TracedWindow(self, self._comm.window(count, dtype))

    def attach(self, tensor: Tensor) -> Memory:
        return TracedWindow(self, self._comm.attach(tensor))

    def shared_zeros(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._comm.shared_zeros(count, dtype)

    def is_shared(self, tensor: Tensor) -> bool:
        return self._comm.is_shared(tensor)

    def put_all(self, puts: Iterable[Put]) -> None:
        details: Details = {"to": [], "bytes": 0}
        with self.timeline.span("puts", WINDOW, details):
            self._comm.put_all(self._plain(puts, details))

    def _plain(self, puts: Iterable[Put], details: Details) -> Iterator[Put]:
        """Yield puts into the windows as they are, and note their ranks and bytes."""
        for put in puts:
            if (rank := self._number(put.rank)) not in details["to"]:
                details["to"].append(rank)
            details["bytes"] += put.values.nbytes
            yield put._replace(window=put.window.plain if isinstance(put.window, TracedWindow) else put.window)

    def _call(self, name: str, category: str = COLLECTIVE, **details: Any) -> EventSpan:
        """Begin a collective call, which has one number on all ranks."""
        if len(self.lost) != self._lost:  # ranks may have failed in different calls
            self._lost, self._calls = len(self.lost), 0
        self._calls += 1
        if self.size > 1:
            details["call"] = f"{self._name}, call {self._calls}" + f" without {self._lost}" * bool(self._lost)
        return self.timeline.span(name, category, details)

    # --- time and end ---------------------------------------------------------------------------------------------
    def compute(self, share: float = 1.0) -> float:
        if self.virtual is None:
            return self._comm.compute(share)
        with self.timeline.span("forward and backward", "compute"):
            return self._comm.compute(share)

    def now(self) -> float:
        return self._comm.now()

    def close(self) -> None:
        with self._call("close"):
            self._comm.close()


def _passed_on(name: str) -> property:
    """Make a property that is that of the communicator within."""
    return property(attrgetter(f"_comm.{name}"), lambda traced, value: setattr(traced._comm, name, value))


for _name in ("traffic", "living", "lost", "deadline_s", "internode", "device_aware"):
    setattr(TracedCommunicator, _name, _passed_on(_name))
for _name in ("host", "link", "overlapping", "failed", "whereabouts", "shrink", "retry_on_failure"):
    setattr(TracedCommunicator, _name, _passed_on(_name))


class TracedRequest(Request):
    """Note when a transfer is complete, and the wait for it."""

    def __init__(self, timeline: Timeline, request: Request, name: str, details: Details):
        self._timeline, self._request, self._name, self._details = timeline, request, name, details
        self._noted = False

    def done(self) -> bool:
        done = self._request.done()
        if done and not self._noted:
            self._noted = True
            self._timeline.add(self._name, MESSAGE, self._timeline.now(), self._details)
        return done

    def wait(self) -> None:
        if self._noted:
            return self._request.wait()
        self._noted = True
        with self._timeline.span(self._name, WAIT, self._details):
            self._request.wait()


class TracedNeighbourhood(Neighbourhood):
    """Note exchanges with neighbours."""

    def __init__(self, comm: TracedCommunicator, plain: Neighbourhood):
        self.sources, self.destinations = plain.sources, plain.destinations
        self._plain, self._timeline = plain, comm.timeline
        self._from = [comm.world_ranks[rank] for rank in self.sources]
        self._to = [comm.world_ranks[rank] for rank in self.destinations]

    def _start(self, send: Tensor, received: Tensor) -> Request:
        with self._timeline.span("send to neighbours", MESSAGE, {"to": self._to, "bytes": send.nbytes}):
            request = self._plain._start(send, received)
        return TracedRequest(self._timeline, request, "receive from neighbours", {"from": self._from})

    def close(self) -> None:
        self._plain.close()


class TracedWindow(Window):
    """Note the calls on a window, or on attached memory; those on a rank's own memory alone move nothing."""

    def __init__(self, comm: TracedCommunicator, plain: Any):
        self.plain, self._comm = plain, comm

    @property
    def local(self) -> Tensor:  # type: ignore[override]
        return self.plain.local

    def get(self, out: Tensor, rank: int, offset: int = 0) -> None:
        self._note("get", "from", rank, out.nbytes, self.plain.get, out, rank, offset)

    def read(self, rank: int, offset: int, count: int, out: Tensor | None = None) -> Tensor:
        n_bytes = count * self.local.itemsize
        return self._note("get", "from", rank, n_bytes, self.plain.read, rank, offset, count, out)

    def put(self, values: Tensor, rank: int, offset: int = 0) -> None:
        self._note("put", "to", rank, values.nbytes, self.plain.put, values, rank, offset)

    def accumulate(self, values: Tensor, rank: int, offset: int = 0) -> None:
        self._note("accumulate", "to", rank, values.nbytes, self.plain.accumulate, values, rank, offset)

    def change(self, function: Callable[..., object], rank: int, *beside: Tensor) -> bool:
        n_bytes, timeline = 0, self._comm.timeline

        def counted(elements: Tensor, *parts: Tensor) -> None:
            nonlocal n_bytes
            n_bytes += elements.nbytes
            function(elements, *parts)

        start_s = timeline.now()
        changed = self.plain.change(counted, rank, *beside)
        if changed and rank != self._comm.rank:  # else the caller moves the elements by other calls
            timeline.add("change", WINDOW, start_s, {"of": self._comm._number(rank), "bytes": n_bytes})
        return changed

    def fetch_add(self, value: int, rank: int, offset: int = 0) -> int:
        return self._note("fetch and add", "to", rank, 8, self.plain.fetch_add, value, rank, offset)

    def compare_and_swap(self, expected: int, desired: int, rank: int, offset: int = 0) -> int:
        call = self.plain.compare_and_swap
        return self._note("compare and swap", "to", rank, 8, call, expected, desired, rank, offset)

    def _note(self, name: str, way: str, rank: int, n_bytes: int, call: Callable[..., Any], *args: Any) -> Any:
        if rank == self._comm.rank:
            return call(*args)
        with self._comm.timeline.span(name, WINDOW, {way: self._comm._number(rank), "bytes": n_bytes}):
            return call(*args)

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
        whose = self._comm._number(self._comm.rank if rank is None else rank)
        with self._comm.timeline.span("wait", WAIT, {"for": what, "in the memory of": whose}):
            self.plain.wait(predicate, rank=rank, offset=offset, count=count, what=what, deadline_s=deadline_s)

    def close(self) -> None:
        self.plain.close()
