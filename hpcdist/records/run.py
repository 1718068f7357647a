"""`run.json`: command, settings, versions and files of each start of a run, to repeat it and to compare it."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from hpcdist.records.files import Count, PathText, read_bounded, read_checked, replace_durably, writing
from hpcdist.records.summary import FILE_NAME as SUMMARY

FILE_NAME = "run.json"
DATE = "%Y-%m-%dT%H:%M:%SZ"
Outcome = Literal["ended", "interrupted", "failed"]
Date = Annotated[str, AfterValidator(lambda text: datetime.strptime(text, DATE) and text)]


class _Table(BaseModel):
    """A table of `_Settings`, the settings that tools read; the others may be anything."""

    name: str = ""
    folder: PathText | None = None
    stages: Annotated[Count, Field(ge=1)] = 1
    samples: Count | None = None
    steps: Count | None = None
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


# Options of strategies: former name -> current name. Files of runs and checkpoints with former names are read.
FORMER_OPTIONS = {"take_up": "merge", "draw_self": "include_self", "compress_answers": "compress_replies"}


class _Settings(BaseModel):
    strategy: _Table = _Table()
    parallel: _Table = _Table()
    checkpoint: _Table | None = None
    budget: _Table | None = None
    epochs: Count | None = None
    batch_size: Count | None = None
    accumulation: Count = 1
    seed: Count | None = None


class JobFile(BaseModel):
    """A job's file and the files that it imported from its folder, copied to the run's folder."""

    model_config = ConfigDict(extra="allow")

    path: str = Field(description="as the user gave it")
    sha256: str
    copies: dict[str, str] = Field(description="sha256 of each copy, by its path in the run's folder")


class Start(BaseModel):
    """One start of a run. Dates are in UTC. Further keys are kept as they are."""

    # A setting may be infinite, and must be read back as such.
    model_config = ConfigDict(extra="allow", ser_json_inf_nan="constants")

    started: Date
    ended: Date | None = Field(None, description="none for a start that was killed, or that still runs")
    outcome: Outcome | None = Field(
        default=None, description="interrupted: it left before its end, and goes on with --resume; none as for `ended`"
    )
    reason: str | None = Field(default=None, description="of an outcome: the signal, the time limit, the error")
    command: list[str]
    job: JobFile
    commit: str | None = Field(description="of the job's folder; none outside of git")
    dirty: bool = Field(description="whether files differed from that commit")
    ranks: Count
    samples: Count | None = Field(None, description="in an epoch")
    labels: list[dict[str, int]] | None = Field(
        None, description="how many samples of each label each worker has, where data.split gives it its own"
    )
    hosts: list[str] = Field(description="of each rank")
    cores: dict[str, int] = Field(default_factory=dict, description="by host: those that its ranks may use, together")
    processors: int | None = Field(None, description="of the first rank's host")
    load: list[float] = Field(
        default_factory=list, description="average of the first rank's host over a minute, at the start and at the end"
    )
    versions: dict[str, str | None]
    settings: dict[str, Any] = Field(description="all of them, defaults included")
    rate_factor: float = Field(1.0, description="by which optimizer.scale multiplied the learning rate")
    virtual: dict[str, Any] | None = Field(
        None, description="network and step times of virtual ranks, whose seconds are virtual in all files"
    )
    went_on_from: str | None = Field(None, description="the checkpoint, in the run's folder")
    step: int = Field(default=0, description="of that checkpoint")
    changed: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]] = Field(
        default_factory=dict,
        description="settings, and `ranks`, that differ from the checkpoint's: its value, this one's",
    )

    @field_validator("settings")
    @classmethod
    def _can_be_read(cls, settings: dict[str, Any]) -> dict[str, Any]:
        _Settings.model_validate(settings)
        strategy = {FORMER_OPTIONS.get(name, name): value for name, value in settings.get("strategy", {}).items()}
        return settings | ({"strategy": strategy} if strategy else {})

    @property
    def took_s(self) -> float:
        """Return the seconds from this start to its end, or until now."""
        return seconds_since(self.started, self.ended)


class RunRecord(Start):
    """A run: its first start, and those with --resume."""

    resumed: list[Start] = Field(default_factory=list)

    @property
    def last(self) -> Start:
        """Return the newest start, with whose settings the run ended."""
        return self.resumed[-1] if self.resumed else self

    @property
    def changes(self) -> dict[int, dict[str, list[Any]]]:
        """Return the settings that changed during the run, by the step after which they changed.

        A start that resumed from an earlier step than starts before it repeats their steps: their changes don't count.
        """
        changes_at: dict[int, dict[str, list[Any]]] = {}
        for start in self.resumed:
            changes_at = {step: changed for step, changed in changes_at.items() if step < start.step}
            if start.changed:
                changes_at[start.step] = start.changed
        return changes_at


def now() -> str:
    """Return the current time in UTC, such as 2026-01-31T12:00:00Z."""
    return datetime.now(timezone.utc).strftime(DATE)


def seconds_since(began: str, ended: str | None = None) -> float:
    """Return the seconds from one date to another, or to now."""
    start, end = (datetime.strptime(date, DATE) for date in (began, ended or now()))
    return (end - start).total_seconds()


def cores_by_host(by_host: Iterable[tuple[str, list[int]]]) -> dict[str, int]:
    """Count the cores that the ranks of each host may use, from what each rank's `local_cores_of_host` returns."""
    cores: dict[str, set[int]] = {}
    for host, local_cores in by_host:
        cores.setdefault(host, set()).update(local_cores)
    return {host: len(of_host) for host, of_host in cores.items()}


def local_cores_of_host() -> tuple[str, list[int]]:
    """Return this process's host and the cores that it may use there."""
    return platform.node(), sorted(os.sched_getaffinity(0))


def load_average() -> list[float]:
    """Return this host's load average over a minute; nothing where the system does not tell."""
    try:
        return [round(os.getloadavg()[0], 2)]
    except (AttributeError, OSError):
        return []


def start_run(folder: Path, start: Start) -> None:
    """Add a start to `run.json`, or create that file.

    The summary of an earlier start is kept as `summary-1.json`..., by the start's number: `summary.json` is there only
    while the newest start has ended well.
    """
    run = load_run(folder)
    if run is None:
        run = RunRecord(**start.model_dump())
    else:
        run.resumed.append(start)
    _write(folder / FILE_NAME, run)
    with suppress(FileNotFoundError):
        (folder / SUMMARY).rename(folder / f"summary-{len(run.resumed)}.json")


def end_run(folder: Path, outcome: Outcome = "ended", reason: str | None = None) -> None:
    """Record when the newest start ended, how, and why."""
    run = load_run(folder)
    if run is not None:
        run.last.ended, run.last.outcome, run.last.reason = now(), outcome, reason
        run.last.load += load_average()
        _write(folder / FILE_NAME, run)


def record_first_step(folder: Path, step: int) -> None:
    """Record the step from which the newest start resumed, if that was not known when it was recorded."""
    run = load_run(folder)
    if run is not None:
        run.last.step = step
        _write(folder / FILE_NAME, run)


def load_run(folder: str | Path) -> RunRecord | None:
    """Read `run.json`; None if there is none, as in folders of older versions; raise DataError if it is damaged."""
    return read_checked(Path(folder) / FILE_NAME, RunRecord, "be what a run was started with", "Move it away to go on.")


def copy_job(folder: Path, path: Path, neighbours: Iterable[Path]) -> JobFile:
    """Copy a job's file and its neighbours to `job` in the run's folder; to `job-2`... if earlier copies differ."""
    home = path.resolve().parent
    files = {str(file.resolve().relative_to(home)): file.read_bytes() for file in (path, *neighbours)}
    checksums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    targets = (folder / ("job" if number == 1 else f"job-{number}") for number in count(1))
    target = next(one for one in targets if not one.exists() or all(_holds(one / name, files[name]) for name in files))
    for name, content in files.items():
        with writing(target / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
        if not _holds(target / name, content):
            replace_durably(target / name, content)
    copies = {f"{target.name}/{name}": digest for name, digest in checksums.items()}
    return JobFile(path=str(path), sha256=checksums[path.resolve().name], copies=copies)


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and read_bounded(path, path.stat().st_size) == content


def _write(path: Path, run: RunRecord) -> None:
    replace_durably(path, (run.model_dump_json(indent=2, exclude_none=False) + "\n").encode())
