"""The jobs that were submitted from a folder: `.hpcdist/jobs.jsonl`, one line per job. Later commands need no flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from hpcdist.records.files import read_lines

FOLDER = Path(".hpcdist")


class Submission(BaseModel):
    """One submitted job. Paths are relative to the folder that it was submitted from."""

    model_config = ConfigDict(extra="forbid")

    job: str  # Slurm's number
    name: str
    submitted: float  # seconds since 1970
    commit: str | None  # of the folder; None outside of git
    dirty: bool  # there were changes beside that commit
    script: str  # the file that holds what was submitted
    log: str  # where %a stands for an array's task
    output: str  # the run's folder; of an array the beginning of its tasks' folders
    cases: int  # of an array; 0 of another job
    spec: dict[str, Any]

    @property
    def folders(self) -> list[Path]:
        """Return the folders of its runs. A study that names none has those that exist by now."""
        output = Path(self.output)
        if "folders" in self.spec:
            return [output.parent / name for name in self.spec["folders"]]
        return sorted(output.parent.glob(f"{output.name}_*")) if self.cases else [output]


_ENTRY = TypeAdapter(Submission)


def append(entry: Submission, folder: Path = FOLDER) -> None:
    """Add a job's line in one write, so that the lines of two processes do not mix."""
    with open(folder / "jobs.jsonl", "ab", buffering=0) as file:
        file.write(entry.model_dump_json().encode() + b"\n")


def read(folder: Path = FOLDER) -> list[Submission]:
    """Read all entries, the oldest first; none where nothing was submitted.

    Raises:
        DataError: a line is damaged.
    """
    return read_lines(folder / "jobs.jsonl", _ENTRY, "a submitted job", "Delete this line to use the others.")


def find(job: str | None, folder: Path = FOLDER) -> Submission | None:
    """Find the entry of a job, also by an array task's id (12_3), or the newest entry; None where there is none."""
    entries = read(folder)
    if job is not None:
        entries = [entry for entry in entries if entry.job == job.partition("_")[0]]
    return entries[-1] if entries else None
