"""Follow all runs of a folder: one run's own, a comparison's, or one that holds runs."""

from __future__ import annotations

import json
from pathlib import Path

from hpcdist.errors import ConfigError
from hpcdist.records import is_abandoned
from hpcdist.records.lock import FILE_NAME as LOCK
from hpcdist.tools.watch.live import LiveRun, quiet_s

OWN = ("run.json", "summary.json", "records-rank*.jsonl")  # the files that make a folder a run's
BELOW = ("*/run.json", "*/*/run.json", "*/*/*/run.json")  # deeper ones are not looked for: it is done again and again


class WatchedFolder:
    """The runs of a folder, those included that are begun later.

    Raises:
        ConfigError: there is no such folder.
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise ConfigError(
                f"folder must be a run's, or hold runs; got {folder}, which is no folder. A run shows its own when it "
                "begins, or takes the one that --output gives."
            )
        self.folder = folder
        self.planned = 0  # runs that a comparison will have
        self._runs: dict[Path, LiveRun] = {}

    @property
    def runs(self) -> list[LiveRun]:
        return list(self._runs.values())

    @property
    def ended(self) -> bool:
        """Tell whether nothing more is to come: all runs that are there, or planned, have their summaries."""
        return bool(self._runs) and len(self._runs) >= self.planned and all(run.ended for run in self._runs.values())

    @property
    def abandoned(self) -> bool:
        """Tell whether no process is at work any more, though there are runs without summaries, or none at all."""
        left = [run for run in self.runs if not run.ended]
        if self.ended or not all(run.abandoned for run in left):
            return False
        if not (self.folder / LOCK).exists():  # runs that have no more in common than their folder
            return bool(left)
        return is_abandoned(self.folder, min(map(quiet_s, [self.folder, *self._runs])))

    def update(self) -> None:
        """Look for new runs, and read what the files of all have got."""
        if any(any(self.folder.glob(pattern)) for pattern in OWN):
            self._runs.setdefault(self.folder, LiveRun(self.folder, self.folder.resolve().name))
        else:
            for path, name in self._found().items():
                self._runs.setdefault(path, LiveRun(path, name, brief=True))
        for run in self._runs.values():
            run.update()

    def _found(self) -> dict[Path, str]:
        """Return the names of the runs below the folder; of a comparison's in the order of its plan."""
        try:
            planned = json.loads((self.folder / "comparison.json").read_bytes())["runs"]
            self.planned = len(planned)
        except (OSError, ValueError, KeyError):
            planned = []
        if planned:
            folders = [self.folder / run["folder"] for run in planned]
            return {path: path.name for path in folders if path.is_dir()}
        paths = sorted(path.parent for pattern in BELOW for path in self.folder.glob(pattern))
        return {path: str(path.relative_to(self.folder)) for path in paths}
