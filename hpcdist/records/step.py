"""The lines of a run: step records, one file for each rank, and evaluations."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from hpcdist.errors import DataError
from hpcdist.records.files import Count, append, damaged_line, open_regular, read_lines, replace_durably, writing

_FILE_NAME = re.compile(r"records-rank(\d{4,})\.jsonl")
RESTART = re.compile(rb'\{"first_step":(\d{1,18})\}\n')
_MOST_BYTES = 1 << 23  # that one call of RecordTail reads; the next one continues


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The record of one rank's step. Traffic and seconds are those of this step, not totals."""

    step: Count  # of this rank, from 1
    clock: Count = 0  # number of updates so far, of the server if there is one, else of this rank
    staleness: tuple[Count, ...] = ()  # in updates, one value for each gradient applied in this step
    samples: Count = 0  # whose gradients this rank computed; 0 on a server
    loss: float | None = None  # mean over those samples
    bytes_sent: Count = 0
    messages_sent: Count = 0
    bytes_fetched: Count = 0  # by one-sided gets
    messages_fetched: Count = 0
    computing_s: float = 0.0
    communicating_s: float = 0.0  # in calls that move data
    waiting_s: float = 0.0  # for another rank to act
    dropped: Count = 0  # gradients that were too stale
    waited_for: dict[int, float] = field(default_factory=dict)  # seconds by the rank that a server waited for
    stage_bytes: Count = 0  # of bytes_sent: to other stages of the model
    stage_s: float = 0.0  # of communicating_s and waiting_s: the pipeline's bubble
    event: str | None = None  # such as a checkpoint or a skipped update

    # A loss may be NaN or infinite, and must be read back as such.
    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", ser_json_inf_nan="constants")

    @property
    def seconds(self) -> float:
        """Return the seconds of the step, whatever they were spent on."""
        return self.computing_s + self.communicating_s + self.waiting_s


RECORD: TypeAdapter[StepRecord] = TypeAdapter(StepRecord)
_OF_STAGES = {"stage_bytes", "stage_s"}  # omitted without stages


def record_path(folder: str | Path, rank: int) -> Path:
    """Return the path of a rank's file of records."""
    return Path(folder) / f"records-rank{rank:04d}.jsonl"


class RecordWriter(AbstractContextManager["RecordWriter"]):
    """Appends step records to a file, buffered, in whole lines.

    In a file with records, those from `first_step` on become invalid. A run that resumes after step 1000 passes 1001,
    so that repeated steps are not counted twice. Nothing is deleted except an incomplete last line after a crash.

    Args:
        path: the file, see `record_path`; its folder is created.
        first_step: the first step that will be written; 0 in a new run.
        flush_s, flush_records: the longest time, and the most records, between two writes to the file.
    """

    def __init__(self, path: str | Path, *, first_step: int = 0, flush_s: float = 2.0, flush_records: int = 1000):
        self.path = Path(path)
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            drop_partial_line(self.path)
            self._file = open(self.path, "a+b", buffering=0)
        self._flush_s, self._flush_records = flush_s, flush_records
        self._lines: list[bytes] = []
        self._flushed_at = time.monotonic()
        if self._file.seek(0, os.SEEK_END):
            self._lines.append(b'{"first_step":%d}\n' % first_step)
            self.flush()

    def write(self, record: StepRecord) -> None:
        staged = record.stage_bytes or record.stage_s
        self._lines.append(RECORD.dump_json(record, exclude=None if staged else _OF_STAGES) + b"\n")
        if len(self._lines) >= self._flush_records or time.monotonic() - self._flushed_at >= self._flush_s:
            self.flush()

    def flush(self) -> None:
        """Write the buffered records to the file at once.

        Raises:
            OutputError: the system refuses; none of the buffered records is in the file, which is closed.
        """
        lines, self._lines = self._lines, []
        append(self._file, self.path, b"".join(lines))
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Flush and close the file. May be called twice."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def drop_partial_line(path: Path) -> None:
    """Cut off what follows the last line end of a file, if there is one, as a killed writer leaves it.

    Raises DataError if the last line is longer than any that is written.
    """
    with suppress(FileNotFoundError), open_regular(path) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - _MOST_BYTES))
        last = file.read(_MOST_BYTES)
        length = end - len(last) + last.rfind(b"\n") + 1
        if length == end:
            return
        if b"\n" not in last and len(last) < end:
            raise DataError(
                f"{path} must have lines; got more than {_MOST_BYTES} bytes without a line end. Move it away to go on."
            )
        os.truncate(path, length)


class RecordTail:
    """A reader of one rank's file while it is written: each call returns the records that are new since the last call.

    It goes by the file's length, which works on network file systems, too. A line without its end is left for the next
    call. So is a line that is no record: a network file system may show the range of what another node has just
    written before its bytes. If it is still no record then, it is skipped.

    Args:
        from_end: skip the records that are there already.
        strict: raise DataError for a line that is no record.
    """

    def __init__(self, path: Path, *, from_end: bool = False, strict: bool = False):
        self._path, self._strict = path, strict
        self._offset = path.stat().st_size if from_end and path.exists() else 0  # bytes that have been read
        self.lines = 0  # that have been read
        self._retried_offset = -1  # the position of a line that was no record

    def __call__(self) -> list[StepRecord | int]:
        """Return the new records. A number among them is the first step that a restarted run takes again.

        Raises:
            DataError: the file can't be read; or a line is no record, and the reader is strict.
        """
        items: list[StepRecord | int] = []
        try:
            with open_regular(self._path) as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # another file of that name: start again
                    self._offset = self.lines = 0
                    items.append(0)
                file.seek(self._offset)
                data = file.read(_MOST_BYTES)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DataError(f"{self._path} must be readable; got {error.strerror}. Move it away to go on.") from None
        if len(data) == _MOST_BYTES and b"\n" not in data:
            raise DataError(
                f"{self._path}:{self.lines + 1} must be a step record; got {_MOST_BYTES} bytes without a line end. The "
                "file is damaged: move it away to go on."
            )
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            try:
                restart = RESTART.fullmatch(line)
                items.append(int(restart[1]) if restart else RECORD.validate_json(line))
            except ValidationError as error:
                if self._strict:
                    remedy = "The file is damaged: delete this line to read the others."
                    raise damaged_line(self._path, self.lines + 1, line, "a step record", error, remedy) from None
                if self._retried_offset != self._offset:  # the first time: leave the line for the next call
                    self._retried_offset = self._offset
                    break
            self._offset += len(line)
            self.lines += 1
        return items

    @property
    def is_cut(self) -> bool:
        """Whether the file has more bytes than were read: its last line is not complete yet."""
        return self._path.stat().st_size > self._offset


def record_files(folder: str | Path) -> dict[int, Path]:
    """Return the files with records in a folder, by rank."""
    paths = {int(match[1]): path for path in Path(folder).glob("*") if (match := _FILE_NAME.fullmatch(path.name))}
    return dict(sorted(paths.items()))


def continue_records(folder: Path, rank: int, ranks: int, first_step: int, saved: Sequence[int]) -> RecordWriter:
    """Return the writer of a rank's records, the next of which is of `first_step`; rank 0 ends former ranks' files.

    `saved` are the steps of each rank in the checkpoint, if that is of other ranks: later ones are repeated.
    """
    firsts = {number: steps + 1 for number, steps in enumerate(saved)}
    for other, path in record_files(folder).items() if rank == 0 else ():
        if other >= ranks:
            RecordWriter(path, first_step=firsts.get(other, first_step)).close()
    return RecordWriter(record_path(folder, rank), first_step=firsts.get(rank, first_step))


def read_records(folder: str | Path) -> dict[int, list[StepRecord]]:
    """Read the valid records of all ranks (see `RecordWriter`), in the order of writing.

    An incomplete last line (the writer was killed, or still writes) is skipped with a warning.

    Raises:
        DataError: the folder has no records, or a line is not a step record.
    """
    files = record_files(folder)
    if not files:
        raise DataError(f"{folder} must hold files records-rank*.jsonl; got none. Give the folder of a run.")
    return {rank: _read_file(path) for rank, path in files.items()}


def _read_file(path: Path) -> list[StepRecord]:
    """Return a rank's valid records: of steps that a restarted run takes again, only the new ones."""
    records: list[StepRecord] = []
    tail = RecordTail(path, strict=True)
    while items := tail():
        for item in items:
            if isinstance(item, StepRecord):
                records.append(item)
            else:
                records = [record for record in records if record.step < item]
    if tail.is_cut:
        warnings.warn(f"{path}:{tail.lines + 1} ends in the middle of a record, which is left out.", stacklevel=3)
    return records


# --- evaluations ------------------------------------------------------------------------------------------------------
FILE_NAME = "evaluations.jsonl"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of the ranks' common parameters."""

    step: Count  # since the run started
    epoch: Count  # number of epochs that have ended
    samples: Count  # trained on so far, by all ranks
    seconds: float  # of training, without evaluations and checkpoints
    metrics: dict[str, float]
    joules: float | None = None  # since the run started, without this evaluation; None where they were not measured

    # A metric may be NaN or infinite, and must be read back as such.
    __pydantic_config__ = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


_EVALUATION: TypeAdapter[Evaluation] = TypeAdapter(Evaluation)


def append_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Append an evaluation as a line. Raise OutputError where it can't be written; then the file is unchanged."""
    path = folder / FILE_NAME
    with writing(path), open(path, "ab", buffering=0) as file:
        append(file, path, _EVALUATION.dump_json(evaluation) + b"\n")


def keep_evaluations(folder: Path, step: int) -> None:
    """Remove the evaluations after `step`, from which the run continues: it repeats them."""
    if not (folder / FILE_NAME).exists():
        return
    earlier = [evaluation for evaluation in read_evaluations(folder) if evaluation.step <= step]
    replace_durably(folder / FILE_NAME, b"".join(_EVALUATION.dump_json(one) + b"\n" for one in earlier))


def read_evaluations(folder: str | Path) -> list[Evaluation]:
    """Read all evaluations of a run, the oldest first; [] without a file; raise DataError for a damaged line.

    A last line that is cut short is skipped.
    """
    path, remedy = Path(folder) / FILE_NAME, "Delete this line to go on."
    evaluations = read_lines(path, _EVALUATION, "an evaluation", remedy, whole=True)
    for number, (previous, evaluation) in enumerate(pairwise(evaluations), start=2):
        if evaluation.step < previous.step:
            reason = "its step is before that of the line above"
            raise damaged_line(path, number, _EVALUATION.dump_json(evaluation), "an evaluation", reason, remedy)
    return evaluations
