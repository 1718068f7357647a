"""One record per step, as JSON lines, one file per rank."""

from __future__ import annotations

import io
import os
import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from hpcdist.errors import DataError
from hpcdist.records.durable import append, writing

_FILE_NAME = re.compile(r"records-rank(\d{4,})\.jsonl")
RESTART = re.compile(rb'\{"first_step":(\d+)\}\n')
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The record of one rank's step. Traffic and seconds are those of this step alone, not totals since the start."""

    step: int  # of this rank, from 1
    clock: int = 0  # number of updates so far: of the server where there is one, else of this rank
    staleness: tuple[int, ...] = ()  # in updates, one value per gradient applied in this step
    samples: int = 0  # whose gradients this rank computed; 0 on a server
    loss: float | None = None  # mean over those samples
    bytes_sent: int = 0
    messages_sent: int = 0
    bytes_fetched: int = 0  # by one-sided gets
    messages_fetched: int = 0
    computing_s: float = 0.0
    communicating_s: float = 0.0  # in calls that move data
    waiting_s: float = 0.0  # for another rank to act
    dropped: int = 0  # gradients that were too stale to be applied
    waited_for: dict[int, float] = field(default_factory=dict)  # seconds that a server held it up, by the rank to blame
    stage_bytes: int = 0  # of bytes_sent: to other stages of the model
    stage_s: float = 0.0  # of communicating_s and waiting_s: for other stages of the model, in the pipeline's bubble
    event: str | None = None  # another event of the step: a checkpoint, a skipped update...

    # A loss may be NaN or infinite, and must be read back as such.
    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants")


RECORD: TypeAdapter[StepRecord] = TypeAdapter(StepRecord)
_OF_STAGES = {"stage_bytes", "stage_s"}  # left out where the model is in no stages


def record_path(folder: str | Path, rank: int) -> Path:
    """Return the path of the file with `rank`'s records."""
    return Path(folder) / f"records-rank{rank:04d}.jsonl"


class RecordWriter:
    """A writer of step records, which it appends to a file: buffered, in whole lines.

    In a file that has records already, those from `first_step` on become invalid: a new run leaves `first_step` at 0,
    one that resumes after step 1000 passes 1001, so that the steps it repeats are not counted twice. Nothing is
    deleted but a last line that a crash cut short.

    Args:
        path: the file, see `record_path`; its folder is made.
        first_step: the first step that will be written.
        flush_s, flush_records: the longest time, and the most records, between two writes to the file.
    """

    def __init__(self, path: str | Path, *, first_step: int = 0, flush_s: float = 2.0, flush_records: int = 1000):
        self.path = Path(path)
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b", buffering=0)
        self._flush_s, self._flush_records = flush_s, flush_records
        self._lines: list[bytes] = []
        self._flushed_at = time.monotonic()
        _drop_partial_line(self._file)
        if self._file.seek(0, os.SEEK_END):
            self._lines.append(b'{"first_step":%d}\n' % first_step)
            self.flush()

    def write(self, record: StepRecord) -> None:
        """Append one record."""
        staged = record.stage_bytes or record.stage_s
        self._lines.append(RECORD.dump_json(record, exclude=None if staged else _OF_STAGES) + b"\n")
        if len(self._lines) >= self._flush_records or time.monotonic() - self._flushed_at >= self._flush_s:
            self.flush()

    def flush(self) -> None:
        """Hand the buffered records to the operating system, in one write.

        Raises:
            OutputError: it refuses; none of the buffered records is in the file, which is closed.
        """
        lines, self._lines = self._lines, []
        append(self._file, self.path, b"".join(lines))
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Flush and close the file. May be called again."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _drop_partial_line(file: io.FileIO) -> None:
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _TAIL_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    file.truncate(end)


def read_records(folder: str | Path) -> dict[int, list[StepRecord]]:
    """Read every rank's valid records (see `RecordWriter`), in the order written.

    A last line without its end (the writer was killed, or still writes) is left out with a warning.

    Raises:
        DataError: the folder has no records, or a line is no step record.
    """
    paths = {int(match[1]): path for path in Path(folder).glob("*") if (match := _FILE_NAME.fullmatch(path.name))}
    if not paths:
        raise DataError(f"{folder} must hold files records-rank*.jsonl; got none. Give the folder of a run.")
    return {rank: list(_read_file(paths[rank])) for rank in sorted(paths)}


def _read_file(path: Path) -> list[StepRecord]:
    records: list[StepRecord] = []
    for number, line in _lines(path):
        if restart := RESTART.fullmatch(line):
            records = [record for record in records if record.step < int(restart[1])]
            continue
        try:
            records.append(RECORD.validate_json(line))
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]
            key = ".".join(map(str, reason["loc"]))
            raise DataError(
                f"{path}:{number} must be a step record; got {line[:60]!r} ({key}: {reason['msg']}). "
                "The file is damaged: delete this line to read the others."
            ) from None
    return records


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                warnings.warn(f"{path}:{number} ends in the middle of a record, which is left out.", stacklevel=2)
                return
            yield number, line
