"""A run's state and results, read from its folder while it trains and after it has ended."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hpcdist.config.merge import describe_changes
from hpcdist.errors import DataError
from hpcdist.records.files import open_regular
from hpcdist.records.lock import is_abandoned
from hpcdist.records.resources import Resources, Usage
from hpcdist.records.run import RunRecord, Start, load_run
from hpcdist.records.step import Evaluation, read_evaluations
from hpcdist.records.summary import Summary, load_summary
from hpcdist.tools.mpirun import without_block
from hpcdist.tools.runs.steps import Steps

if TYPE_CHECKING:
    from pandas import DataFrame

FAILURE = "failure.txt"  # in the folder of a failed run of a comparison: its last lines
LAST_BYTES = 1 << 16  # of a log that are searched for its last lines
# ended: has a summary; interrupted: left early, on a signal or at a time limit, can be resumed; failed: by an error;
# dead: no process is running, for unknown reasons.
Outcome = Literal["ended", "interrupted", "failed", "dead"]
# waiting: no files yet; starting: no records yet; training: records are written.
State = Literal[Outcome, "waiting", "starting", "training"]
T = TypeVar("T")


class Run:
    """A run, read from its folder; `update` reads changes.

    Args:
        follow: for a run that may be training: a half-written file keeps its previous content until the next `update`,
            and `steps` merges blocks of steps if they are many.

    Attributes:
        summary: None until the run has ended.
        record: content of `run.json`; None before the run starts, and for old versions.
        evaluations: so far.
        abandoned: no process is running, and there is no summary.
        damage: why a file could not be read, if `follow`.

    Raises:
        DataError: a file is damaged, and not `follow`.
    """

    def __init__(self, folder: str | Path, *, follow: bool = False):
        self.folder, self._follow = Path(folder), follow
        self.summary: Summary | None = None
        self.record: RunRecord | None = None
        self.evaluations: list[Evaluation] = []
        self.abandoned = False
        self.damage: str | None = None
        self._steps: Steps | None = None
        self._resources: Resources | None = None
        self._stamps: dict[str, tuple[int, ...]] = {}  # stamps of the files that have been read
        self.update()

    def update(self) -> None:
        """Read changed files. A finished run is read again only if it is resumed.

        Raises:
            DataError: a file is damaged, and not `follow`.
        """
        if self.summary is not None and self._stamps.get("run.json") == self._stamp("run.json"):
            return
        # In this order: a process writes its summary before it exits, and completes its records before the summary.
        abandoned = (self._follow or not is_done(self.folder)) and is_abandoned(self.folder, quiet_s(self.folder))
        ended = is_done(self.folder)
        try:
            self.record = self._read("run.json", load_run, self.record)
            self.evaluations = self._read("evaluations.jsonl", read_evaluations, self.evaluations)
            if self._steps is not None:
                self._steps.read()
            if self._resources is not None:
                self._resources.read()
            self.summary = self._read("summary.json", load_summary, self.summary) if ended else None
            self.damage = None
        except (DataError, FileNotFoundError) as error:  # being replaced, or partially visible on a network file system
            if not self._follow:
                raise
            self.damage = str(error)
        self.abandoned = abandoned and self.summary is None

    def _read(self, name: str, load: Callable[[Path], T], current: T) -> T:
        """Read a file by `load`; return `current` if it does not exist, or is unchanged since it was read."""
        stamp = self._stamp(name)
        if stamp is None or self._stamps.get(name) == stamp:
            return current
        content = load(self.folder)
        self._stamps[name] = stamp
        return content

    def _stamp(self, name: str) -> tuple[int, ...] | None:
        """Return a file's modification time, size and inode; None if it does not exist, () if it can't be read."""
        try:
            stat = (self.folder / name).stat()
        except OSError as error:
            return None if isinstance(error, (FileNotFoundError, NotADirectoryError)) else ()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    # --- the run ------------------------------------------------------------------------------------------------------
    @property
    def ended(self) -> bool:
        return self.summary is not None

    @property
    def start(self) -> Start | None:
        return None if self.record is None else self.record.last

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of the newest start; empty if not recorded."""
        return {} if self.start is None else self.start.settings

    @property
    def changes(self) -> list[str]:
        """Return a line for each step at which the run was resumed with other settings."""
        by_step = {} if self.record is None else self.record.changes
        return [f"settings changed at step {step}: {describe_changes(changed)}" for step, changed in by_step.items()]

    @property
    def strategy(self) -> str:
        if self.summary is not None:
            return self.summary.strategy
        return str(self.settings.get("strategy", {}).get("name", ""))

    @property
    def outcome(self) -> Outcome | None:
        """Return how the run has ended; None while it trains, or before it starts."""
        if self.ended:
            return "ended"
        start = self.start
        if (start is not None and start.outcome == "failed") or (self.folder / FAILURE).exists():
            return "failed"
        if start is not None and start.outcome == "interrupted":
            return "interrupted"
        return "dead" if self.abandoned or (start is not None and start.ended is not None) else None

    @property
    def state(self) -> State:
        """Return the outcome, or what the run is doing."""
        if self.outcome is not None:
            return self.outcome
        if len(self.steps.recent):
            return "training"
        return "waiting" if self.record is None else "starting"

    @property
    def failure(self) -> str | None:
        """Return why there is no summary, with the last lines of a comparison's log; None if the run has ended."""
        if self.ended:
            return None
        if self.damage is not None:
            return f"is damaged: {self.damage}"
        if lines := last_lines(self.folder / FAILURE, 4):
            return "\n".join(["failed:", *lines])
        if self.start is None:
            return "was not started"
        if self.abandoned and self.start.ended is None:
            return "was killed, or its host failed; --resume or the same script continues"
        if self.start.ended is None:
            return "has started and not ended"
        if self.start.outcome == "interrupted":
            return f"was interrupted at {self.start.ended} ({self.start.reason}); --resume or the same script continues"
        why = "" if self.start.reason is None else f": {self.start.reason}"
        return f"failed, and ended at {self.start.ended}{why}"

    @property
    def batch(self) -> int | None:
        """Return the samples of a step of one worker; None if not recorded."""
        size = self.settings.get("batch_size")
        return None if size is None else size * self.settings.get("accumulation", 1)

    # --- results ------------------------------------------------------------------------------------------------------
    @property
    def steps(self) -> Steps:
        """Return the steps of all ranks; records are read on first use, then by `update`."""
        if self._steps is None:
            self._steps = Steps(self.folder, follow=self._follow)
            self._steps.read()
        return self._steps

    @property
    def resources(self) -> dict[int, list[Usage]]:
        """Return each rank's resource usage over time, read like `steps`; empty for virtual ranks."""
        if self._resources is None:
            self._resources = Resources(self.folder)
            self._resources.read()
        return self._resources.samples

    @property
    def has_read_steps(self) -> bool:
        return self._steps is not None

    @property
    def records(self) -> DataFrame:
        """Return a frame with a row per step and rank; its columns are described at `Steps`."""
        return self.steps.frame

    @property
    def metrics(self) -> DataFrame:
        """Return a frame with a row per evaluation: step, epoch, samples, seconds, joules, `metric.NAME`."""
        from pandas import DataFrame

        spent = ("step", "epoch", "samples", "seconds", "joules")
        rows = [
            {key: getattr(evaluation, key) for key in spent}
            | {f"metric.{key}": value for key, value in evaluation.metrics.items()}
            for evaluation in self.evaluations
        ]
        return DataFrame(rows, columns=None if rows else list(spent))

    @property
    def loss(self) -> float | None:
        """Return the mean of the ranks' newest training losses, without ranks of earlier starts; None without any."""
        losses = [loss for rank, loss in self.steps.losses.items() if not self.start or rank < self.start.ranks]
        return statistics.fmean(losses) if losses else None


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last non-empty lines of a log; empty if it can't be read."""
    with suppress(OSError), open_regular(log) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
        lines = without_block(file.read(LAST_BYTES)).decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-count:]
    return []


def is_done(folder: Path) -> bool:
    """Return whether a run has ended well, that is, has a summary."""
    return os.path.exists(folder / "summary.json")  # Path.exists raises for a folder without permission


def quiet_s(folder: Path) -> float:
    """Return the seconds since the last write to a file in the folder."""
    written = 0.0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # it has just been replaced
                written = max(written, entry.stat().st_mtime)
    return time.time() - written
