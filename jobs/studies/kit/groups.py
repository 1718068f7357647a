"""Make the runs of groups that a study declares, in one folder, each once; and read them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hpcdist.config.files import neighbours
from hpcdist.config.merge import as_flags, fingerprint, load
from hpcdist.errors import ConfigError, RunError
from hpcdist.records import Evaluation, Summary, load_summary, locked, read_evaluations
from hpcdist.tools import console
from hpcdist.tools.compare import folder
from hpcdist.tools.compare.experiment import Experiment
from hpcdist.tools.compare.launchers import Launcher
from hpcdist.tools.compare.plan import ComparedGroup, PlannedRun, file_name
from hpcdist.tools.compare.run_all import Runner, interruptible, missing
from hpcdist.tools.compare.trained import higher_is_better
from hpcdist.tools.runs import FAILURE
from hpcdist.tools.simulate.cluster import ClusterConfig
from hpcdist.tools.simulate.launcher import Simulation, VirtualLauncher
from hpcdist.train.job import create_data
from hpcdist.train.runs import specify

Key = TypeVar("Key")
Found = TypeVar("Found")
RUNS, TUNING = "runs", "tuning"  # folders of the runs that a study shows, and of those that rates are chosen by


@dataclass(frozen=True)
class EndedRun:
    """A run that has ended: its settings as one table, its summary and its evaluations."""

    settings: Mapping[str, Any]
    summary: Summary
    curve: Sequence[Evaluation] = ()
    folder: Path = Path()

    @classmethod
    def read(cls, run: PlannedRun, output: Path) -> EndedRun:
        """Read a run from its folder."""
        where = output / run.folder
        return cls(load({}, None, run.overrides), load_summary(where), read_evaluations(where), where)

    def as_table(self) -> dict[str, Any]:
        """Return all of it, of JSON's types."""
        curve = [asdict(evaluation) for evaluation in self.curve]
        return {"settings": self.settings, "summary": self.summary.model_dump(mode="json"), "curve": curve}


def declare_group(
    name: str,
    ranks: int,
    settings: Mapping[str, Any],
    cluster: Mapping[str, str] | None = None,
    loop: str = "",
) -> ComparedGroup:
    """Declare the runs of a name on so many ranks, by tables of settings and of the virtual cluster's."""
    own = tuple(f"{key}={value}" for key, value in (cluster or {}).items())
    return ComparedGroup(name, "strategy", ranks, 0, tuple(as_flags(settings)), file_name(name), name, own, loop)


def at_rate(group: ComparedGroup, rate: float) -> ComparedGroup:
    """Return a group with a learning rate."""
    return replace(
        group, name=f"{group.name}, optimizer.lr={rate:g}", settings=(*group.settings, f"optimizer.lr={rate!r}")
    )


class GroupRuns:
    """Make the runs of a study's groups in one folder, and read them.

    A run is known by the job's file, its settings and its cluster. If one of these changes, it is another run.

    Args:
        job: the job's file, with the loops of groups that have one.
        output: the folder.
        workers: runs that are made at the same time.
        metric: of the job, by which a report judges runs; by default the job's first.
        target: of the metric, for a report.
        settings: of all runs, as a table.
        cluster: of virtual ranks, but for the parts that a group has of its own; `compute` is 0 s by default.
        launcher: makes runs on real ranks, instead of virtual ones.
    """

    def __init__(
        self,
        job: Path,
        output: Path,
        workers: int = 1,
        *,
        metric: str | None = None,
        target: float | None = None,
        settings: Mapping[str, Any] | None = None,
        cluster: Mapping[str, object] | None = None,
        launcher: Launcher | None = None,
    ):
        if workers < 1:
            raise ConfigError(f"workers must be at least 1; got {workers}. Give as many as there are cores.")
        self._job_path, self._output, self._workers = job, output, workers
        flags = tuple(as_flags(settings or {}))
        with neighbours(job):
            self._job, self._config = specify(job, None, flags)
        virtual = None if launcher is not None else {"compute": "0s", **(cluster or {})}
        metric = metric or next(iter(self._job.metrics))
        sha256 = hashlib.sha256(job.read_bytes()).hexdigest()
        self._experiment = Experiment(
            job=str(job),
            job_sha256=sha256,
            metric=metric,
            settings=flags,
            virtual=virtual,
            target=target,
            evaluations=0,
        )
        if launcher is None:
            described = ClusterConfig.from_mapping(virtual, "cluster")
            launcher = VirtualLauncher(Simulation(str(job), described, 1, {}), workers)
        self._launcher = launcher

    def __enter__(self) -> GroupRuns:
        return self

    def __exit__(self, *failure: object) -> None:
        if isinstance(self._launcher, VirtualLauncher):
            self._launcher.__exit__(*failure)

    def make(
        self, groups: Mapping[Key, ComparedGroup], seeds: Iterable[int], title: str = "runs", parent: str = RUNS
    ) -> dict[Key, list[EndedRun]]:
        """Make the runs that are missing, and return all by group, in the order of the seeds.

        Groups that are the same share their runs.

        Raises:
            RunError: some have failed; all others have been made.
        """
        if any(not group.loop for group in groups.values()):  # a loop sees to its data itself
            self.create_data()
        of_group = {key: [self._plan(group, seed, parent) for seed in seeds] for key, group in groups.items()}
        planned = list(dict.fromkeys(run for runs in of_group.values() for run in runs))
        if self._experiment.virtual is None:  # changes on the machine are to strike all groups alike
            random.Random(0).shuffle(planned)
        runner = Runner(self._output, self._launcher, self._workers)
        with (
            locked(self._output),
            interruptible(lambda: "the same command resumes it"),
            runner.display(title, len(missing(planned, self._output))),
        ):
            if parent == RUNS:
                every = list(dict.fromkeys(groups.values()))
                better = higher_is_better(self._job.metrics, self._experiment.metric)
                folder.write(self._output, self._experiment, higher_is_better=better, groups=every, runs=planned)
            failed = runner.run_all(planned)
        if failed:
            where = ", ".join(str(self._output / run.folder) for run in failed)
            raise RunError(
                f"{len(failed)} runs have failed: see {FAILURE} in {where}. The same command runs them again."
            )
        return {key: [EndedRun.read(run, self._output) for run in runs] for key, runs in of_group.items()}

    def create_data(self) -> None:
        """Make the job's data file if it isn't there, which runs side by side can't share."""
        create_data(self._job, Path(self._config.data.path))

    def measure(self, group: ComparedGroup, seeds: Iterable[int]) -> list[EndedRun]:
        """Make the runs of a group by which its rate is chosen. Threads may do so at the same time: see `each`."""
        planned = [self._plan(group, seed, TUNING) for seed in seeds]
        if failed := Runner(self._output, self._launcher).run_all(planned):
            raise RunError(f"{self._output / failed[0].folder} has failed: see {FAILURE} there.")
        return [EndedRun.read(run, self._output) for run in planned]

    def each(self, function: Callable[[Key], Found], keys: Sequence[Key], title: str) -> dict[Key, Found]:
        """Call a function, which measures groups, for each key, for as many at a time as there are workers."""
        threads, found = ThreadPoolExecutor(self._workers), {}
        try:
            with locked(self._output):
                for key, value in zip(keys, threads.map(function, keys), strict=True):
                    found[key] = value
                    console.note(f"{title}: {len(found)} of {len(keys)}")
            return found
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _plan(self, group: ComparedGroup, seed: int, parent: str) -> PlannedRun:
        words = (*self._experiment.settings, *group.settings, *group.cluster, group.loop.rpartition(":")[2])
        here = [word.replace(str(self._output), "") for word in words]  # the folder may be moved
        mark = fingerprint({"job": self._experiment.job_sha256, "virtual": self._experiment.virtual, "words": here})
        return replace(group, stem=f"{group.stem[:80]}-{mark[:8]}").run(self._experiment, seed, parent=parent)


def search(measure: Callable[[int], Found], merit: Callable[[Found], Any], guess: int, known: dict[int, Found]) -> int:
    """Find the whole number with the least merit, such as a rate's power of 2: measure neighbours until it has both.

    Args:
        merit: of what was measured: the less the better.
        guess: where to begin, if nothing is known yet.
        known: what was measured before; what is measured now is added.
    """

    def best() -> int:
        return min(known, key=lambda number: merit(known[number]))

    around = best() if known else guess
    while unknown := [number for number in (around - 1, around, around + 1) if number not in known]:
        for number in unknown:
            known[number] = measure(number)
        around = best()
    return around
