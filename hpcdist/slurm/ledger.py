"""What was submitted from a folder: `.hpcdist/jobs.jsonl`, a line per job. So later commands need no flags."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from hpcdist.errors import DataError

FOLDER = Path(".hpcdist")


class Entry(BaseModel):
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


def append(entry: Entry, folder: Path = FOLDER) -> None:
    """Adds a line, in one write, so that two at once do not mix."""
    with open(folder / "jobs.jsonl", "ab", buffering=0) as file:
        file.write(entry.model_dump_json().encode() + b"\n")


def read(folder: Path = FOLDER) -> list[Entry]:
    """All entries, the oldest first; none where nothing was submitted.

    Raises:
        DataError: a line is damaged.
    """
    path, found = folder / "jobs.jsonl", []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), start=1):
        try:
            found.append(Entry.model_validate_json(line))
        except ValidationError as error:
            raise DataError(
                f"{path}:{number} must be a submitted job; got {line[:60]!r} ({error.errors()[0]['msg']}). "
                "Delete this line to use the others."
            ) from None
    return found


def find(job: str | None, folder: Path = FOLDER) -> Entry | None:
    """The entry of a job (of an array also by a task's id, 12_3), or the newest of all; None if there is none."""
    entries = read(folder)
    if job is not None:
        entries = [entry for entry in entries if entry.job == job.partition("_")[0]]
    return entries[-1] if entries else None


def commit() -> tuple[str | None, bool]:
    """The commit of the current folder, and whether tracked files differ from it; (None, False) outside of git."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return None, False
    return head.strip(), bool(_git("status", "--porcelain", "--untracked-files=no"))


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, errors="replace")
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
