"""Checks of a trace in Chrome's format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

Event = dict[str, Any]
SLACK_US = 0.002  # of times that are rounded to nanoseconds


class Trace:
    """A timeline as it is in its file."""

    def __init__(self, path: Path):
        self.content = json.loads(path.read_text())
        self.events: list[Event] = self.content["traceEvents"]
        self.spans = [event for event in self.events if event["ph"] == "X"]

    def of(self, name: str, rank: int | None = None) -> list[Event]:
        return [e for e in self.spans if e["name"] == name and rank in (None, e["pid"])]

    def names(self, kind: str) -> dict[int, list[str]]:
        """The names of processes or of threads, by rank."""
        found: dict[int, list[str]] = {}
        for event in self.events:
            if event["name"] == kind:
                found.setdefault(event["pid"], []).append(event["args"]["name"])
        return found

    def arrows(self) -> Iterator[tuple[Event, Event]]:
        """The begin and the end of each arrow from a send to a receive."""
        ends = {e["id"]: e for e in self.events if e["ph"] == "f"}
        yield from ((e, ends.pop(e["id"])) for e in self.events if e["ph"] == "s")
        assert ends == {}

    def check(self) -> None:
        """Fields are as the format has them, each thread's events in order, each within another or apart from it.

        Both ends of each arrow lie in an event of its thread.
        """
        for arrow in (end for both in self.arrows() for end in both):
            of_thread = [e for e in self.spans if (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])]
            assert any(e["ts"] <= arrow["ts"] < e["ts"] + max(e["dur"], SLACK_US) for e in of_thread), arrow
        for event in self.events:
            assert event["ph"] in "XMisf" and isinstance(event["pid"], int) and isinstance(event["name"], str)
            assert event["ph"] == "M" or isinstance(event["ts"], float)
        for thread, events in groupby(self.spans, lambda e: (e["pid"], e["tid"])):
            around: list[float] = []  # ends of the events that this one is in
            before = float("-inf")
            for event in events:
                start, end = event["ts"], event["ts"] + event["dur"]
                assert event["dur"] >= 0 and start >= before, f"{thread}: {event} begins before the one before it"
                before = start
                while around and around[-1] <= start + SLACK_US:
                    around.pop()
                assert not around or end <= around[-1] + SLACK_US, f"{thread}: {event} ends after the one around it"
                around.append(end)
