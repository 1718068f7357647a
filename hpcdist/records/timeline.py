"""A rank's timeline: the events of its threads with their times, as a file in Chrome's trace format.

The file is an array of events, one on each line; viewers open it even if its end is missing. `merged_timeline` merges
the files of all ranks.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain, count
from pathlib import Path
from typing import Any

from hpcdist.records.files import append, writing

Details = dict[str, Any]
MAX_EVENTS = 200_000  # events of a rank
MAX_EVENTS_OF_ALL = 1_000_000  # events of all ranks; viewers can still open so many
CHUNK = 512  # events written at once
THREADS = {"hpcdist-calls": "collective calls, in the background", "hpcdist-window": "serving of windows"}


class Timeline:
    """Records the events of one rank and writes them to a file. Threads may share it.

    Of more than `max_events` events the file has the first and the last half of these, and the number of missing ones.

    Args:
        path: of the timeline of all ranks; this rank's file lies beside it and is overwritten.
        now: the rank's clock, in seconds.
        max_events: events in the file.
    """

    def __init__(self, path: Path, rank: int, now: Callable[[], float], max_events: int = MAX_EVENTS):
        self.path, self.rank, self.now = path, rank, now
        self.role = ""  # of the rank, which its name shows
        # Events that are not yet written: row, start, end, name, category, details.
        self._recent: list[tuple[int, float, float, str, str, Details]] = []
        self._first_left = max_events - max_events // 2  # number of first events that may still be written
        self._last: deque[tuple[int, float, float, str, str, Details]] = deque(maxlen=max_events // 2)
        self.dropped = 0  # the number of missing events
        self.clock: list[tuple[float, float]] = []  # moments, and this clock minus the first rank's at each, in seconds
        self.error_s = 0.0  # the largest error of these differences
        self._rows: dict[int, int] = {}  # by Python's thread id: the thread's row in viewers, "tid" in the file
        self._writing = threading.Lock()
        self._rank_path = rank_path(path, rank)
        with writing(self._rank_path):
            self._file = open(self._rank_path, "wb", buffering=0)
        self._write("[\n" + _metadata(rank, 0, "process_name", name=f"rank {rank}"))
        self._add_row("main")

    # --- recording ------------------------------------------------------------------------------------------------
    @contextmanager
    def span(self, name: str, category: str, details: Details | None = None) -> Iterator[Details]:
        """Record the context, or calls of a function that it decorates, as events; yield the details, to complete."""
        details, start_s = {} if details is None else details, self.now()
        try:
            yield details
        finally:
            self.add(name, category, start_s, details)

    def add(self, name: str, category: str, start_s: float, details: Details) -> None:
        """Add an event of this thread that started at `start_s` and ends now."""
        row = self._rows.get(threading.get_ident())
        if row is None:
            name_of_thread = threading.current_thread().name
            row = self._add_row(THREADS.get(name_of_thread, name_of_thread))
        self._recent.append((row, start_s, self.now(), name, category, details))
        if len(self._recent) >= CHUNK:
            self._write_recent()

    def _add_row(self, name: str) -> int:
        """Give this thread a separate row in the timeline."""
        with self._writing:
            row = self._rows[threading.get_ident()] = len(self._rows)
            self._write(",\n" + _metadata(self.rank, row, "thread_name", name=name))
        return row

    # --- writing --------------------------------------------------------------------------------------------------
    def _write_recent(self) -> None:
        """Write recent events while there is room for first ones; keep later ones as candidates for the last half."""
        with self._writing:
            count = len(self._recent)
            events = self._recent[:count]
            del self._recent[:count]  # other threads may append now
            first, later = events[: self._first_left], events[self._first_left :]
            self._first_left -= len(first)
            if first:
                self._write("".join(self._line(*event) for event in first))
            self.dropped += max(0, len(self._last) + len(later) - (self._last.maxlen or 0))
            self._last.extend(later)

    def _line(self, row: int, start_s: float, end_s: float, name: str, category: str, details: Details) -> str:
        # By hand, in a fifth of the time of json.dumps.
        times, args = span_us(start_s, end_s), _encode(details) if details else "{}"
        return (
            f',\n{{"name": {_encode_name(name)}, "cat": {_encode_name(category)}, "ph": "X", "ts": {times["ts"]}, '
            f'"dur": {times["dur"]}, "pid": {self.rank}, "tid": {row}, "args": {args}}}'
        )

    def _write(self, text: str) -> None:
        if not self._file.closed:
            append(self._file, self._rank_path, text.encode())

    def close(self) -> None:
        """Write the remaining events and end the file. Later events are ignored."""
        self._write_recent()
        with self._writing:
            if self.dropped:
                message = f"{self.dropped:,} events dropped before this one"
                at_us = span_us(self._last[0][1], self._last[0][1])["ts"] if self._last else 0.0
                instant = {"name": message, "ph": "i", "s": "p", "ts": at_us, "pid": self.rank, "tid": 0}
                self._write(f",\n{json.dumps(instant)}")
            self._write("".join(self._line(*event) for event in self._last) + "\n]\n")
            self._last.clear()
            self._file.close()


def unused(path: Path) -> Path:
    """Return the path, or the first free one of `timeline-2.json`... if an earlier start has written a timeline."""
    others = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(each for each in chain([path], others) if not each.exists() and not rank_path(each, 0).exists())


def rank_path(path: Path, rank: int) -> Path:
    """Return the file of one rank's timeline, beside that of all."""
    return path.with_name(f"{path.stem}-rank{rank:04d}{path.suffix}")


def span_us(start_s: float, end_s: float) -> dict[str, float]:
    """Convert an event's times to microseconds, rounded so that nested events stay nested."""
    start_us = round(1e6 * start_s, 3)
    return {"ts": start_us, "dur": round(round(1e6 * end_s, 3) - start_us, 3)}


_encode = json.JSONEncoder().encode
_encode_name = lru_cache(maxsize=1024)(_encode)


def _metadata(rank: int, row: int, kind: str, **args: Any) -> str:
    return json.dumps({"name": kind, "ph": "M", "pid": rank, "tid": row, "args": args})
