"""A timeline of calls, in the format of Chrome's trace viewer: how long ranks waited for each call, and ran it."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from hpcdist.records.files import append, writing
from hpcdist.records.timeline import CHUNK


class CallTimeline:
    """Writes a matcher's events to a new file, a chunk of lines at a time; with `mark_cycles` its exchanges, too."""

    def __init__(self, path: Path, mark_cycles: bool):
        self._path, self._marks, self._start = path, mark_cycles, time.perf_counter()
        self._lock, self._numbers = threading.Lock(), dict[str, int]()
        with writing(path):
            self._file = open(path, "wb", buffering=0)
        since_us = time.time_ns() // 1000
        start = {"ts": 0, "name": "start_time", "ph": "M", "args": {"start_time_since_epoch_in_micros": since_us}}
        self._lines = ["[\n" + json.dumps(start)]

    def submitted(self, kind: str, name: str) -> None:
        self._record(kind, name, "B", f"NEGOTIATE_{kind.upper()}")

    def started(self, kind: str, name: str) -> None:
        self._record(kind, name, "E")
        self._record(kind, name, "B", kind.upper())

    def ended(self, kind: str, name: str) -> None:
        self._record(kind, name, "E")

    def exchanged(self) -> None:
        if self._marks:
            self._add({"name": "CYCLE_START", "ph": "i", "s": "g", "pid": -1})

    def _record(self, kind: str, name: str, phase: str, event: str = "") -> None:
        """Add the start ("B") or end ("E") of an event; viewers show each call's name as a process."""
        title = f"{kind}.{name}"
        with self._lock:
            new = title not in self._numbers
            number = self._numbers.setdefault(title, len(self._numbers))
        if new:
            self._add({"name": "process_name", "ph": "M", "pid": number, "args": {"name": title}})
        self._add({"ph": phase, "pid": number} | ({"name": event} if event else {}))

    def _add(self, event: dict[str, Any]) -> None:
        line = json.dumps({"ts": round((time.perf_counter() - self._start) * 1e6), **event})
        with self._lock:
            self._lines.append(f",\n{line}")
            if len(self._lines) >= CHUNK and not self._file.closed:
                self._write()

    def _write(self) -> None:
        append(self._file, self._path, "".join(self._lines).encode())
        self._lines.clear()

    def close(self) -> None:
        """Write the remaining events and end the file; later ones are ignored."""
        with self._lock:
            self._lines.append("\n]\n")
            self._write()
            self._file.close()
