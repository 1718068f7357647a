"""A wrapper around a communicator, and around the objects it creates, that records calls in a timeline.

Without a timeline the wrapper does not exist, and calls cost nothing extra.
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
from hpcdist.records.timeline import MAX_EVENTS, MAX_EVENTS_OF_ALL, Details, Timeline

MESSAGE, WINDOW, COLLECTIVE, WAIT = "message", "window", "collective", "wait"  # categories


def start_timeline(comm: Communicator, path: Path, max_events: int | None = None) -> Communicator:
    """Collective. Return a communicator of the same ranks that records its calls; measure how far clocks differ.

    Each rank writes a file next to `path`; `end_timeline` merges these files into `path`.

    Args:
        max_events: maximum number of events in a rank's file; by default 200,000, at most a million over all ranks.

    Raises:
        ConfigError: the communicator has a timeline already.
        OutputError: a file can't be written; raised on all ranks.
    """
    if comm.trace.timeline is not None:
        raise ConfigError(f"timeline must be started once; got one already, {comm.trace.timeline.path}. End it first.")
    max_events = min(MAX_EVENTS, MAX_EVENTS_OF_ALL // comm.size) if max_events is None else max_events
    timeline = comm.raise_on_all_ranks(lambda: Timeline(path, comm.rank, comm.now, max_events))
    _measure_clock(comm, timeline)
    return TracedCommunicator(comm, timeline)


def end_timeline(comm: Communicator) -> None:
    """Collective among the surviving ranks. Merge the timelines of all ranks into one file.

    Raises:
        OutputError: the file can't be written; raised on all ranks.
    """
    timeline = comm.trace.timeline
    if timeline is None:
        raise ConfigError("timeline must be started before it is ended; got none. Call start_timeline first.")
    if not comm.failures.lost:  # otherwise clocks are assumed to run at the same speed
        _measure_clock(comm, timeline)
    timeline.close()
    name = f"rank {comm.rank} ({timeline.role + ', ' if timeline.role else ''}host {platform.node()})"
    local = RankTimeline(
        rank=comm.rank, name=name, clock=timeline.clock, error_s=timeline.error_s, dropped=timeline.dropped
    )
    timelines = [RankTimeline(**values) for values in comm.gather(local.model_dump()) if values is not None]
    seconds = "real" if comm.platform.virtual is None else "virtual"
    writes = comm.rank == comm.failures.alive[0]
    comm.raise_on_all_ranks(lambda: merge_timelines(timeline.path, timelines, seconds=seconds) if writes else None)


def _measure_clock(comm: Communicator, timeline: Timeline) -> None:
    """Collective. Measure how far this rank's clock is ahead of rank 0's, and add that to its timeline."""
    ahead = ahead_of_first(comm, comm.now)
    timeline.clock.append((comm.now(), ahead.seconds))
    timeline.error_s = max(timeline.error_s, ahead.error_s)


class Traced:
    """Descriptor of a method that calls the same method of `plain` and records the call in the timeline.

    Args:
        name: name of the event.
        category: category of the event; "" (default): record no event.
        describe: returns the event's details for the wrapper and the call's arguments; None: do not record this call.
        result: returns the method's result for the wrapper, the result of `plain`'s method, and the details.
    """

    def __init__(
        self, name: str = "", category: str = "", describe: Callable[..., Details | None] = lambda *args,
        **options: {}, result: Callable[[Any, Any, Details], Any] = lambda traced, result, details: result,
    ):  # fmt: skip
        self._name, self._category, self._describe, self._result = name, category, describe, result

    def __set_name__(self, owner: type, method: str) -> None:
        self._method = method

    def __get__(self, traced: Any, owner: type | None = None) -> Callable[..., Any]:
        return partial(self._call, traced)

    def _call(self, traced: Any, *args: Any, **options: Any) -> Any:
        """Call the method of `plain`, recorded as an event if `describe` returns details."""
        call, details = getattr(traced.plain, self._method), self._describe(traced, *args, **options)
        if details is None:
            return call(*args, **options)
        if not self._category:
            return self._result(traced, call(*args, **options), details)
        with traced.trace.timeline.span(self._name, self._category, details):
            return self._result(traced, call(*args, **options), details)


class Wrapper:
    """Base class of the wrappers: forwards attributes that a wrapper does not define to the `plain` object."""

    trace: Trace

    def __init__(self, comm: TracedCommunicator, plain: Any):
        self.comm, self.plain, self.trace = comm, plain, comm.trace

    def __getattr__(self, name: str) -> Any:
        if name == "plain":
            raise AttributeError(name)
        return getattr(self.plain, name)


class TracedCommunicator(Wrapper, Communicator):
    """Record the calls of the communicator `plain` in `timeline`. Events name ranks by their numbers in the job.

    Args:
        name: the communicator's name, the same on all of its ranks.
    """

    def __init__(self, plain: Communicator, timeline: Timeline, name: str = "all"):
        self.plain, self.trace, self._name = plain, plain.trace, name
        self.memory = TracedMemory(self, plain.memory)  # type: ignore[assignment]
        self._timeline = self.trace.timeline = timeline
        self._splits = self._calls = self._lost = 0
        self._messages: Counter[tuple[int, int, int]] = Counter()
        self._numbers_receives = True

    _sendrecv: Any = Traced(
        "send and receive", MESSAGE,
        lambda comm, send, dest, recv, source, tag: comm._sent(send, dest, tag) | comm._received(source, tag),
    )  # fmt: skip
    _isend: Any = Traced(
        "send", MESSAGE, lambda comm, tensor, dest, tag: comm._sent(tensor, dest, tag),
        lambda comm, request, details: TracedRequest(comm, request, "wait for a send", {"to": details["to"]}),
    )  # fmt: skip
    _irecv: Any = Traced(
        "receive", "", lambda comm, tensor, source, tag: comm._received(source, tag),
        lambda comm, request, details: TracedRequest(comm, request, "receive", details),
    )  # fmt: skip
    _probe: Any = Traced(
        "wait for a message", WAIT, lambda comm, source, tag, block: {} if block else None,
        lambda comm, envelope, details: comm._arrived(envelope, details),
    )  # fmt: skip
    allreduce: Any = Traced(
        "all-reduce (MPI's own)", COLLECTIVE, lambda comm, tensor: comm._numbered(bytes=tensor.nbytes)
    )
    _broadcast: Any = Traced(
        "broadcast", COLLECTIVE,
        lambda comm, tensor, root: comm._numbered(bytes=tensor.nbytes, root=comm.number(root)),
    )  # fmt: skip
    _gather: Any = Traced("gather", COLLECTIVE, lambda comm, data: comm._numbered(bytes=len(data)))
    barrier: Any = Traced("barrier", WAIT, lambda comm: comm._numbered())
    neighbourhood: Any = Traced(
        describe=lambda comm, *ends: dict(zip(("from", "to"), ([comm.number(rank) for rank in end] for end in ends))),
        result=lambda comm, plain, ends: TracedNeighbourhood(comm, plain, ends),
    )
    _window: Any = Traced(result=lambda comm, plain, details: TracedWindow(comm, plain))
    compute: Any = Traced(
        "forward and backward", "compute", lambda comm, share=1.0: None if comm.platform.virtual is None else {}
    )
    close: Any = Traced("close", COLLECTIVE, lambda comm: comm._numbered())
    now: Any = Traced()
    overlapping: Any = Traced()
    queue: Any = Traced()

    def _split(self, color: int | None, key: int, traffic: Traffic | None) -> TracedCommunicator | None:
        self._splits += 1
        with self.trace.span("split", COLLECTIVE, **self._numbered()):
            part = self.plain.split(color, key, traffic=traffic)
        name = f"{self._name}/{self._splits}.{color}"
        return None if part is None else TracedCommunicator(part, self._timeline, name)

    def put_all(self, puts: Iterable[Put]) -> None:
        def plain() -> Iterator[Put]:
            """Yield the puts with the windows that the wrappers contain; count them in `details`."""
            for put in puts:
                if (rank := self.number(put.rank)) not in details["to"]:
                    details["to"].append(rank)
                details["bytes"] += put.values.nbytes
                yield put._replace(window=put.window.plain if isinstance(put.window, TracedWindow) else put.window)

        with self.trace.span("puts", WINDOW, to=[], bytes=0) as details:
            self.plain.put_all(plain())

    # --- details of events ----------------------------------------------------------------------------------------
    def number(self, rank: int) -> int:
        """Return the number of a rank in the job."""
        return self.platform.world_ranks[rank] if 0 <= rank < self.size else rank  # the call itself refuses a wrong one

    def _sent(self, tensor: Tensor, dest: int, tag: int) -> Details:
        return {"to": self.number(dest), "bytes": tensor.nbytes, "sent": self._message(self.rank, dest, tag)}

    def _received(self, source: int, tag: int) -> Details:
        """Describe a receive by its source and, while no receive has used ANY, by its message's name."""
        if source == ANY or tag == ANY:
            self._numbers_receives = False  # from here on it is unknown which message a receive got
        if not self._numbers_receives:
            return {} if source == ANY else {"from": self.number(source)}
        return {"from": self.number(source), "received": self._message(source, self.rank, tag)}

    def _message(self, source: int, dest: int, tag: int) -> str:
        """Return a name for the next message, the same at both ends: messages with equal tags arrive in order."""
        key = source, dest, tag
        self._messages[key] += 1
        return f"{self._name}: {source} to {dest}, tag {tag}, message {self._messages[key]}"

    def _arrived(self, envelope: Envelope, details: Details) -> Envelope:
        details["from"] = self.number(envelope.source)
        return envelope

    def _numbered(self, **details: Any) -> Details:
        """Return a collective call's details, with its number, which is the same on all ranks."""
        lost = len(self.failures.lost)
        if lost != self._lost:  # ranks may have failed in different calls
            self._lost, self._calls = lost, 0
        self._calls += 1
        if self.size > 1:
            details["call"] = f"{self._name}, call {self._calls}" + f" without {lost}" * bool(lost)
        return details


class TracedRequest(Request):
    """Record when a transfer is complete, and the wait for it."""

    def __init__(self, comm: TracedCommunicator, request: Request, name: str, details: Details):
        self._trace, self._request, self._name, self._details = comm.trace, request, name, details
        self._recorded = False

    def done(self) -> bool:
        done = self._request.done()
        if done and not self._recorded:
            self._recorded = True
            with self._trace.span(self._name, MESSAGE, **self._details):
                pass  # an event without duration: the moment of completion
        return done

    def wait(self) -> None:
        if self._recorded:
            return self._request.wait()
        self._recorded = True
        with self._trace.span(self._name, WAIT, **self._details):
            self._request.wait()


class TracedNeighbourhood(Wrapper):
    """Record exchanges with neighbours."""

    start = Traced(
        "send to neighbours", MESSAGE,
        lambda around, send, received: {"to": around.ends["to"], "bytes": send.nbytes},
        lambda around, request, details: TracedRequest(
            around.comm, request, "receive from neighbours", {"from": around.ends["from"]}
        ),
    )  # fmt: skip

    def __init__(self, comm: TracedCommunicator, plain: Any, ends: Details):
        super().__init__(comm, plain)
        self.ends = ends


class TracedMemory(Wrapper):
    """Wrap attached memory, to record calls on it."""

    attach = Traced(result=lambda memory, plain, details: TracedWindow(memory.comm, plain))


class TracedWindow(Wrapper):
    """Record calls on a window or attached memory of other ranks; calls on the local memory move nothing."""

    get = Traced("get", WINDOW, lambda window, out, rank, offset=0: window.moved("from", rank, out.nbytes))
    read = Traced(
        "get", WINDOW,
        lambda window, rank, offset, count, out=None: window.moved("from", rank, count * window.local.itemsize),
    )  # fmt: skip
    put = Traced("put", WINDOW, lambda window, values, rank, offset=0: window.moved("to", rank, values.nbytes))
    accumulate = Traced(
        "accumulate", WINDOW, lambda window, values, rank, offset=0: window.moved("to", rank, values.nbytes)
    )
    fetch_add = Traced("fetch and add", WINDOW, lambda window, value, rank, offset=0: window.moved("to", rank, 8))
    compare_and_swap = Traced(
        "compare and swap", WINDOW, lambda window, expected, desired, rank, offset=0: window.moved("to", rank, 8)
    )
    wait = Traced(
        "wait", WAIT, lambda window, predicate, *, rank=None, what="a change in a window", **options: {
            "for": what, "in the memory of": window.comm.number(window.comm.rank if rank is None else rank),
        },
    )  # fmt: skip

    def moved(self, direction: str, rank: int, n_bytes: int) -> Details | None:
        """Describe a transfer of n bytes, `from` or `to` a rank; None for the local memory."""
        return None if rank == self.comm.rank else {direction: self.comm.number(rank), "bytes": n_bytes}

    def change(self, function: Callable[..., object], rank: int, *operands: Tensor) -> bool:
        n_bytes, timeline = 0, self.comm._timeline

        def counted(elements: Tensor, *parts: Tensor) -> None:
            nonlocal n_bytes
            n_bytes += elements.nbytes
            function(elements, *parts)

        start_s = timeline.now()
        changed = self.plain.change(counted, rank, *operands)
        if changed and rank != self.comm.rank:  # otherwise the caller moves the elements by other calls
            timeline.add("change", WINDOW, start_s, {"of": self.comm.number(rank), "bytes": n_bytes})
        return changed


ROUND_TRIPS = 8
REQUEST, REPLY = 30_005, 30_006  # tags


class Ahead(NamedTuple):
    """Seconds by which a clock is ahead of rank 0's, and the error bound of that measurement."""

    seconds: float
    error_s: float


def measure_ahead(comm: Communicator, others: Sequence[int], clock: Callable[[], float]) -> dict[int, Ahead]:
    """Collective. Return, on rank 0, how far the clock of each rank in `others` is ahead of rank 0's.

    Other ranks return an empty dict; those not in `others` immediately.
    """
    remote_s, offsets = torch.empty(1, dtype=torch.float64), {}
    for other in others:
        trips = []  # (seconds of a round trip, seconds by which the other clock is then ahead)
        for _ in range(ROUND_TRIPS):
            if comm.rank == 0:
                start = clock()
                comm.isend(torch.zeros(1), other, REQUEST).wait()
                comm.irecv(remote_s, other, REPLY).wait()
                end = clock()
                trips.append((end - start, float(remote_s) - (start + end) / 2))
            elif comm.rank == other:
                comm.irecv(torch.empty(1), 0, REQUEST).wait()
                comm.isend(torch.tensor([clock()], dtype=torch.float64), 0, REPLY).wait()
        if trips:
            took_s, ahead_s = min(trips)  # the shortest trip has the smallest error: at most half its time
            offsets[other] = Ahead(ahead_s, took_s / 2)
    return offsets


def ahead_of_first(comm: Communicator, clock: Callable[[], float]) -> Ahead:
    """Collective. Return how far this rank's clock is ahead of rank 0's; ranks of one node share a clock.

    Always 0 without MPI: virtual ranks share one clock, too.
    """
    if comm.mpi is None:
        return Ahead(0.0, 0.0)
    leaders = {node: comm.nodes.index(node) for node in comm.nodes}  # the first rank of each node
    offsets = measure_ahead(comm, sorted(set(leaders.values()) - {0}), clock)
    of_leaders = comm.gather({str(leader): list(offset) for leader, offset in offsets.items()})[0]
    return Ahead(*of_leaders.get(str(leaders[comm.nodes[comm.rank]]), (0.0, 0.0)))
