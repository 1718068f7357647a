"""A communicator that notes its calls in a timeline: around one of any kind, and with it around what that one makes.

Without a timeline this wrapper does not exist, and calls cost nothing more.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcdist.comm.capabilities import Trace
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.transfer import ANY, Envelope, Request, Traffic
from hpcdist.comm.window import Put
from hpcdist.errors import ConfigError
from hpcdist.records.merged_timeline import RankTimeline, merge_timelines
from hpcdist.records.timeline import MOST, MOST_OF_ALL, Details, Timeline

MESSAGE, WINDOW, COLLECTIVE, WAIT = "message", "window", "collective", "wait"  # categories


def start_timeline(comm: Communicator, path: Path, most: int | None = None) -> Communicator:
    """Collective. Return a communicator of the same ranks that notes its calls; measures the ranks' clocks.

    Each rank writes a file beside `path`, until `end_timeline` makes one of them.

    Args:
        most: events of a rank in its file; by default 200,000, and with many ranks a million of all together.

    Raises:
        ConfigError: the communicator has a timeline.
        OutputError: a file can't be written; on all ranks alike.
    """
    if comm.trace.timeline is not None:
        raise ConfigError(f"timeline must be begun once; got one already, {comm.trace.timeline.path}. End it first.")
    most = min(MOST, MOST_OF_ALL // comm.size) if most is None else most
    timeline = comm.raise_on_all_ranks(lambda: Timeline(path, comm.rank, comm.now, most))
    _look_at_clock(comm, timeline)
    return TracedCommunicator(comm, timeline)


def end_timeline(comm: Communicator) -> None:
    """Collective among the surviving ranks. Merge the timelines of all ranks into one file.

    Raises:
        OutputError: it can't be written; on all ranks alike.
    """
    timeline = comm.trace.timeline
    if timeline is None:
        raise ConfigError("timeline must be begun before it is ended; got none. Call begin_timeline first.")
    if not comm.failures.lost:  # else clocks are taken to go at one speed
        _look_at_clock(comm, timeline)
    timeline.close()
    name = f"rank {comm.rank} ({timeline.role + ', ' if timeline.role else ''}host {platform.node()})"
    own = RankTimeline(
        rank=comm.rank, name=name, clock=timeline.clock, error_s=timeline.error_s, dropped=timeline.dropped
    )
    found = [RankTimeline(**one) for one in comm.gather(own.model_dump()) if one is not None]
    seconds = "real" if comm.platform.virtual is None else "virtual"
    first = comm.rank == comm.failures.alive[0]
    comm.raise_on_all_ranks(lambda: merge_timelines(timeline.path, found, seconds=seconds) if first else None)


def _look_at_clock(comm: Communicator, timeline: Timeline) -> None:
    """Collective. Measure how far this rank's clock is ahead of the first's."""
    ahead = ahead_of_first(comm, comm.now)
    timeline.clock.append((comm.now(), ahead.seconds))
    timeline.error_s = max(timeline.error_s, ahead.error_s)


class Noted:
    """A method that notes its calls in the timeline, and passes them on to the same method of `plain`.

    Args:
        name: of the event.
        category: of the event; "" where the call itself is none, and by default.
        describe: makes the details of a call from its object and its arguments; None where nothing is to be noted.
        result: makes the method's result from its object, the result of `plain` and the details.
    """

    def __init__(
        self,
        name: str = "",
        category: str = "",
        describe: Callable[..., Details | None] = lambda *args, **options: {},
        result: Callable[[Any, Any, Details], Any] = lambda traced, result, details: result,
    ):
        self._name, self._category, self._describe, self._result = name, category, describe, result

    def __set_name__(self, owner: type, method: str) -> None:
        self._method = method

    def __get__(self, traced: Any, owner: type | None = None) -> Callable[..., Any]:
        return partial(self._call, traced)

    def _call(self, traced: Any, *args: Any, **options: Any) -> Any:
        call, details = getattr(traced.plain, self._method), self._describe(traced, *args, **options)
        if details is None:
            return call(*args, **options)
        if not self._category:
            return self._result(traced, call(*args, **options), details)
        with traced.trace.timeline.span(self._name, self._category, details):
            return self._result(traced, call(*args, **options), details)


class Within:
    """A traced communicator, or an object of one, around a plain one that has all that is not noted here."""

    trace: Trace

    def __init__(self, comm: TracedCommunicator, plain: Any):
        self.comm, self.plain, self.trace = comm, plain, comm.trace

    def __getattr__(self, name: str) -> Any:
        if name == "plain":
            raise AttributeError(name)
        return getattr(self.plain, name)


class TracedCommunicator(Within, Communicator):
    """Note the calls of the communicator `plain` in `timeline`. Ranks are named by their numbers in the job.

    Args:
        name: of the communicator, the same on all of its ranks.
    """

    def __init__(self, plain: Communicator, timeline: Timeline, name: str = "all"):
        self.plain, self.trace, self._name = plain, plain.trace, name
        self.memory = TracedMemory(self, plain.memory)  # type: ignore[assignment]
        self._timeline = self.trace.timeline = timeline
        self._splits = self._calls = self._lost = 0
        self._messages: Counter[tuple[int, int, int]] = Counter()
        self._numbers_receives = True

    sendrecv: Any = Noted(
        "send and receive",
        MESSAGE,
        lambda comm, send, dest, recv, source, tag=0: comm._sent(send, dest, tag) | comm._received(source, tag),
    )
    isend: Any = Noted(
        "send",
        MESSAGE,
        lambda comm, tensor, dest, tag=0: comm._sent(tensor, dest, tag),
        lambda comm, request, details: TracedRequest(comm, request, "wait for a send", {"to": details["to"]}),
    )
    irecv: Any = Noted(
        "receive",
        "",
        lambda comm, tensor, source=ANY, tag=ANY: comm._received(source, tag),
        lambda comm, request, details: TracedRequest(comm, request, "receive", details),
    )
    probe: Any = Noted(
        "wait for a message",
        WAIT,
        lambda comm, source=ANY, tag=ANY, *, block=True: {} if block else None,
        lambda comm, envelope, details: comm._arrived(envelope, details),
    )
    allreduce: Any = Noted(
        "all-reduce (MPI's own)", COLLECTIVE, lambda comm, tensor: comm._numbered(bytes=tensor.nbytes)
    )
    broadcast: Any = Noted(
        "broadcast",
        COLLECTIVE,
        lambda comm, tensor, root=0: comm._numbered(bytes=tensor.nbytes, root=comm.number(root)),
    )
    _gather: Any = Noted("gather", COLLECTIVE, lambda comm, data: comm._numbered(bytes=len(data)))
    barrier: Any = Noted("barrier", WAIT, lambda comm: comm._numbered())
    neighbourhood: Any = Noted(
        describe=lambda comm, *ends: dict(zip(("from", "to"), ([comm.number(rank) for rank in one] for one in ends))),
        result=lambda comm, plain, ends: TracedNeighbourhood(comm, plain, ends),
    )
    window: Any = Noted(result=lambda comm, plain, details: TracedWindow(comm, plain))
    compute: Any = Noted(
        "forward and backward", "compute", lambda comm, share=1.0: None if comm.platform.virtual is None else {}
    )
    close: Any = Noted("close", COLLECTIVE, lambda comm: comm._numbered())
    now: Any = Noted()
    overlapping: Any = Noted()
    queue: Any = Noted()

    def _split(self, color: int | None, key: int, traffic: Traffic | None) -> TracedCommunicator | None:
        self._splits += 1
        with self.trace.span("split", COLLECTIVE, **self._numbered()):
            made = self.plain.split(color, key, traffic=traffic)
        name = f"{self._name}/{self._splits}.{color}"
        return None if made is None else TracedCommunicator(made, self._timeline, name)

    def put_all(self, puts: Iterable[Put]) -> None:
        def plain() -> Iterator[Put]:
            for put in puts:
                if (rank := self.number(put.rank)) not in details["to"]:
                    details["to"].append(rank)
                details["bytes"] += put.values.nbytes
                yield put._replace(window=put.window.plain if isinstance(put.window, TracedWindow) else put.window)

        with self.trace.span("puts", WINDOW, to=[], bytes=0) as details:
            self.plain.put_all(plain())

    # --- details of events ----------------------------------------------------------------------------------------
    def number(self, rank: int) -> int:
        """Return a rank's number in the job."""
        return self.platform.world_ranks[rank] if 0 <= rank < self.size else rank  # the call itself refuses a wrong one

    def _sent(self, tensor: Tensor, dest: int, tag: int) -> Details:
        return {"to": self.number(dest), "bytes": tensor.nbytes, "sent": self._message(self.rank, dest, tag)}

    def _received(self, source: int, tag: int) -> Details:
        if source == ANY or tag == ANY:
            self._numbers_receives = False  # from here on: which message it took is not known
        if not self._numbers_receives:
            return {} if source == ANY else {"from": self.number(source)}
        return {"from": self.number(source), "received": self._message(source, self.rank, tag)}

    def _message(self, source: int, dest: int, tag: int) -> str:
        """Name the next message from one rank to another; those of one tag do not overtake each other."""
        key = source, dest, tag
        self._messages[key] += 1
        return f"{self._name}: {source} to {dest}, tag {tag}, message {self._messages[key]}"

    def _arrived(self, envelope: Envelope, details: Details) -> Envelope:
        details["from"] = self.number(envelope.source)
        return envelope

    def _numbered(self, **details: Any) -> Details:
        """Number a collective call; it has one number on all ranks."""
        lost = len(self.failures.lost)
        if lost != self._lost:  # ranks may have failed in different calls
            self._lost, self._calls = lost, 0
        self._calls += 1
        if self.size > 1:
            details["call"] = f"{self._name}, call {self._calls}" + f" without {lost}" * bool(lost)
        return details


class TracedRequest(Request):
    """Note when a transfer is complete, and the wait for it."""

    def __init__(self, comm: TracedCommunicator, request: Request, name: str, details: Details):
        self._trace, self._request, self._name, self._details = comm.trace, request, name, details
        self._noted = False

    def done(self) -> bool:
        done = self._request.done()
        if done and not self._noted:
            self._noted = True
            with self._trace.span(self._name, MESSAGE, **self._details):
                pass
        return done

    def wait(self) -> None:
        if self._noted:
            return self._request.wait()
        self._noted = True
        with self._trace.span(self._name, WAIT, **self._details):
            self._request.wait()


class TracedNeighbourhood(Within):
    """Note exchanges with neighbours."""

    start = Noted(
        "send to neighbours",
        MESSAGE,
        lambda around, send, received: {"to": around.ends["to"], "bytes": send.nbytes},
        lambda around, request, details: TracedRequest(
            around.comm, request, "receive from neighbours", {"from": around.ends["from"]}
        ),
    )

    def __init__(self, comm: TracedCommunicator, plain: Any, ends: Details):
        super().__init__(comm, plain)
        self.ends = ends


class TracedMemory(Within):
    """Note the calls on attached memory."""

    attach = Noted(result=lambda memory, plain, details: TracedWindow(memory.comm, plain))


class TracedWindow(Within):
    """Note the calls on a window, or on attached memory; those on a rank's own memory alone move nothing."""

    get = Noted("get", WINDOW, lambda window, out, rank, offset=0: window.moved("from", rank, out.nbytes))
    read = Noted(
        "get",
        WINDOW,
        lambda window, rank, offset, count, out=None: window.moved("from", rank, count * window.local.itemsize),
    )
    put = Noted("put", WINDOW, lambda window, values, rank, offset=0: window.moved("to", rank, values.nbytes))
    accumulate = Noted(
        "accumulate", WINDOW, lambda window, values, rank, offset=0: window.moved("to", rank, values.nbytes)
    )
    fetch_add = Noted("fetch and add", WINDOW, lambda window, value, rank, offset=0: window.moved("to", rank, 8))
    compare_and_swap = Noted(
        "compare and swap", WINDOW, lambda window, expected, desired, rank, offset=0: window.moved("to", rank, 8)
    )
    wait = Noted(
        "wait",
        WAIT,
        lambda window, predicate, *, rank=None, what="a change in a window", **options: {
            "for": what,
            "in the memory of": window.comm.number(window.comm.rank if rank is None else rank),
        },
    )

    def moved(self, way: str, rank: int, n_bytes: int) -> Details | None:
        return None if rank == self.comm.rank else {way: self.comm.number(rank), "bytes": n_bytes}

    def change(self, function: Callable[..., object], rank: int, *beside: Tensor) -> bool:
        n_bytes, timeline = 0, self.comm._timeline

        def counted(elements: Tensor, *parts: Tensor) -> None:
            nonlocal n_bytes
            n_bytes += elements.nbytes
            function(elements, *parts)

        start_s = timeline.now()
        changed = self.plain.change(counted, rank, *beside)
        if changed and rank != self.comm.rank:  # else the caller moves the elements by other calls
            timeline.add("change", WINDOW, start_s, {"of": self.comm.number(rank), "bytes": n_bytes})
        return changed


TRIPS = 8
ASK, TELL = 30_005, 30_006  # tags


class Ahead(NamedTuple):
    """The seconds by which a clock is ahead of the first rank's, and how wrong that may be."""

    seconds: float
    error_s: float


def measure_ahead(comm: Communicator, others: Sequence[int], clock: Callable[[], float]) -> dict[int, Ahead]:
    """Collective. Measure how far these ranks' clocks are ahead of rank 0's, one after the other; known to rank 0.

    The others do not wait here.
    """
    theirs, found = torch.empty(1, dtype=torch.float64), {}
    for other in others:
        trips = []
        for _ in range(TRIPS):
            if comm.rank == 0:
                start = clock()
                comm.isend(torch.zeros(1), other, ASK).wait()
                comm.irecv(theirs, other, TELL).wait()
                end = clock()
                trips.append((end - start, float(theirs) - (start + end) / 2))
            elif comm.rank == other:
                comm.irecv(torch.empty(1), 0, ASK).wait()
                comm.isend(torch.tensor([clock()], dtype=torch.float64), 0, TELL).wait()
        if trips:
            took_s, ahead_s = min(trips)
            found[other] = Ahead(ahead_s, took_s / 2)
    return found


def ahead_of_first(comm: Communicator, clock: Callable[[], float]) -> Ahead:
    """Collective. Return how far this rank's clock is ahead of rank 0's; ranks of one node have one clock.

    Nothing on virtual ranks, which have one clock too.
    """
    if comm.mpi is None:
        return Ahead(0.0, 0.0)
    leaders = {node: comm.nodes.index(node) for node in comm.nodes}
    found = measure_ahead(comm, sorted(set(leaders.values()) - {0}), clock)
    told = comm.gather({str(leader): list(ahead) for leader, ahead in found.items()})[0]
    return Ahead(*told.get(str(leaders[comm.nodes[comm.rank]]), (0.0, 0.0)))
