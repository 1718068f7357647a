"""The jobs submitted from a folder: `.hpcdist/jobs.jsonl`, one line per job, read by later commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from hpcdist.records.files import read_lines

FOLDER = Path(".hpcdist")


class Submission(BaseModel):
    """One submitted job. Paths are relative to the folder from which it was submitted."""

    model_config = ConfigDict(extra="forbid")

    job: str  # Slurm's number
    name: str
    submitted: float  # seconds since 1970
    commit: str | None  # of the folder; None outside of git
    dirty: bool  # uncommitted changes
    script: str  # file of the submitted script
    log: str  # %a: number of the array's task
    output: str  # the run's folder; of an array, the prefix of its tasks' folders
    cases: int  # number of an array's tasks; 0: no array
    spec: dict[str, Any]

    @property
    def folders(self) -> list[Path]:
        """Return the folders of its runs; of a study without named folders, those that exist."""
        output = Path(self.output)
        if "folders" in self.spec:
            return [output.parent / name for name in self.spec["folders"]]
        return sorted(output.parent.glob(f"{output.name}_*")) if self.cases else [output]


_ENTRY = TypeAdapter(Submission)


def append(entry: Submission, folder: Path = FOLDER) -> None:
    """Append a job's line in one write, so that the lines of two processes don't mix."""
    with open(folder / "jobs.jsonl", "ab", buffering=0) as file:
        file.write(entry.model_dump_json().encode() + b"\n")


def read(folder: Path = FOLDER) -> list[Submission]:
    """Read all entries, the oldest first; empty if nothing was submitted. Raises DataError if a line is damaged."""
    return read_lines(folder / "jobs.jsonl", _ENTRY, "a submitted job", "Delete this line to use the others.")


def find(job: str | None, folder: Path = FOLDER) -> Submission | None:
    """Return the entry of a job, or of an array task (12_3); without an id the newest entry; None if there is none."""
    entries = read(folder)
    if job is not None:
        entries = [entry for entry in entries if entry.job == job.partition("_")[0]]
    return entries[-1] if entries else None
