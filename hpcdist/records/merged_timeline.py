"""`timeline.json`: the timelines of all ranks on one clock, with who waited for whom.

Reference: Google, "Trace event format", 2016; https://ui.perfetto.dev and chrome://tracing show it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from hpcdist.records.files import replacing, writing
from hpcdist.records.timeline import rank_path, span_us

FILE_NAME = "timeline.json"
Event = dict[str, Any]


class RankTimeline(BaseModel):
    """A rank's timeline in its file, and its clock."""

    rank: int
    name: str = Field(description="as viewers show it")
    clock: list[tuple[float, float]] = Field(description="moments, and how far this clock was ahead of the first's")
    error_s: float = Field(0.0, description="how wrong the latter may be")
    dropped: int = 0

    def first_rank_s(self, local_s: float) -> float:
        """Convert a moment of this rank's clock to the first rank's; the clocks drift apart evenly."""
        (first_s, ahead_s), (last_s, ahead_last_s) = self.clock[0], self.clock[-1]
        if last_s > first_s:
            ahead_s += (ahead_last_s - ahead_s) * (local_s - first_s) / (last_s - first_s)
        return local_s - ahead_s


def merge_timelines(path: Path, ranks: Sequence[RankTimeline], **about: Any) -> None:
    """Write the timeline of all ranks from the ranks' files, and remove these.

    Events of one thread are sorted by start time. A collective call names the rank that started it last, for which the
    others waited; arrows lead from sends to the ends of their receives. Holds one rank's events at a time. `about`:
    metadata for the file.
    """
    zero_s = min(rank.first_rank_s(rank.clock[0][0]) for rank in ranks)
    links = _Links()
    for rank in ranks:
        for event in _events(path, rank, zero_s):
            links.record(event)
    about |= {"ranks": len(ranks), "dropped": {rank.rank: rank.dropped for rank in ranks if rank.dropped}}
    about["clocks"] = {
        rank.rank: {"ahead, s": [ahead for _, ahead in rank.clock], "error, s": rank.error_s} for rank in ranks
    }
    with writing(path):
        with replacing(path) as temporary, open(temporary, "w") as file:
            file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n')
            between = ""
            for event in (event for rank in ranks for event in _merged(path, rank, zero_s, links)):
                file.write(between + json.dumps(event))
                between = ",\n"
            file.write("\n]}\n")
        for rank in ranks:
            rank_path(path, rank.rank).unlink(missing_ok=True)


def _merged(path: Path, rank: RankTimeline, zero_s: float, links: _Links) -> Iterator[Event]:
    """Yield a rank's events by thread, sorted by start time (ties: the longest first), with the arrows of messages."""
    yield {"name": "process_sort_index", "ph": "M", "pid": rank.rank, "args": {"sort_index": rank.rank}}
    events = list(_events(path, rank, zero_s))
    # The file has events in the order of their ends: of equal events the later one is around the earlier one.
    end_order = {id(event): position for position, event in enumerate(events)}
    events.sort(key=lambda e: (e["ph"] != "M", e["tid"], e.get("ts", 0), -e.get("dur", 0), -end_order[id(e)]))
    for event in events:
        if event["name"] == "process_name":
            event["args"]["name"] = rank.name
        arrows = links.complete(event)
        yield event
        yield from arrows


def _events(path: Path, rank: RankTimeline, zero_s: float) -> Iterator[Event]:
    """Yield the events in a rank's file, with times of the first rank's clock, less `zero_s`."""
    file = rank_path(path, rank.rank)
    text = file.read_text(errors="replace") if file.is_file() else ""  # of a rank that died there may be none
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        try:
            event = json.loads(line.rstrip(","))
        except ValueError:
            continue  # cut short, as its rank died
        if "ts" in event:
            local_us = event["ts"], event["ts"] + event.get("dur", 0)
            times = span_us(*(rank.first_rank_s(1e-6 * us) - zero_s for us in local_us))
            event |= times if "dur" in event else {"ts": times["ts"]}
        yield event


class _Links:
    """The connections between events of several ranks: collective calls, and messages.

    Events have an id in `args["call"]`, `["sent"]` or `["received"]` that is the same on all ranks; see `comm.traced`.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int]] = {}  # of a call: when the last rank came, and which
        self._ends: dict[str, float] = {}  # of a message that was received: when
        self._starts: dict[str, float] = {}  # and sent
        self._numbers: dict[str, int] = {}

    def record(self, event: Event) -> None:
        """First pass over all events: record when the last rank started each call, and the times of each message."""
        args = event.get("args", {})
        if call := args.get("call"):
            self._last[call] = max(self._last.get(call, (float("-inf"), -1)), (event["ts"], event["pid"]))
        if sent := args.get("sent"):
            self._starts[sent] = event["ts"]
        if received := args.get("received"):
            self._ends[received] = event["ts"] + event["dur"]

    def complete(self, event: Event) -> list[Event]:
        """Add to a call's event which rank started it last; return the arrows of messages that start or end here."""
        args = event.get("args", {})
        if call := args.get("call"):
            at_us, last = self._last[call]
            if at_us > event["ts"]:
                args |= {"waited for": f"rank {last}", "waited, ms": round(1e-3 * (at_us - event["ts"]), 3)}
        arrows = []
        for kind, phase, binding in (("sent", "s", {}), ("received", "f", {"bp": "e"})):  # ends in the event around it
            message = args.get(kind)
            if message in self._starts and message in self._ends:
                number = self._numbers.setdefault(message, len(self._numbers))
                arrow = {"name": "message", "cat": "message", "ph": phase, "id": number}
                # A nanosecond before the end: viewers take the event around that moment.
                last_us = max(event["ts"], round(event["ts"] + event["dur"] - 0.001, 3))
                at_us = event["ts"] if phase == "s" else last_us
                arrows.append(arrow | {"ts": at_us, "pid": event["pid"], "tid": event["tid"]} | binding)
        return arrows
