"""Read a rank's records while they are written: by the file's length, which works on network file systems, too."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from hpcdist.records.step import RECORD, RESTART, StepRecord

MOST_BYTES = 1 << 23  # that one call reads; the next one goes on


class RecordTail:
    """A reader of one rank's file; each call returns the records that have come since the last one.

    A line without its end is left for the next call. So is one that is no record: a network file system may show the
    place of what another node has just written before its bytes. If it is still none then, it is skipped.

    Args:
        from_end: leave out the records that are there already.
    """

    def __init__(self, path: Path, *, from_end: bool = False):
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0  # bytes that have been read
        self._doubtful = -1  # the place of a line that was no record

    def __call__(self) -> list[StepRecord | int]:
        """Return the new records. A number among them is that of the first step which a restart takes again."""
        if not self._path.exists():
            return []
        items: list[StepRecord | int] = []
        if self._path.stat().st_size < self._offset:  # another file of that name
            self._offset = 0
            items.append(0)
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            data = file.read(MOST_BYTES)
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            try:
                restart = RESTART.fullmatch(line)
                items.append(int(restart[1]) if restart else RECORD.validate_json(line))
            except ValidationError:
                if self._doubtful != self._offset:
                    self._doubtful = self._offset
                    break
            self._offset += len(line)
        return items
