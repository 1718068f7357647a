"""Make runs of a comparison on virtual ranks, several of them side by side in processes of their own."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcdist.comm.virtual import Straggler, run_virtual
from hpcdist.config import load
from hpcdist.config.files import load_function, neighbours
from hpcdist.errors import HpcdistError, RunError
from hpcdist.tools.compare.folder import read
from hpcdist.tools.compare.plan import Declaration, PlannedRun
from hpcdist.tools.simulate.cluster import ClusterConfig
from hpcdist.tools.simulate.pool import Processes
from hpcdist.tools.simulate.step_time import measure_step
from hpcdist.train import runs
from hpcdist.train.data import make_data


def on_cluster(declared: Declaration, cluster: ClusterConfig, output: Path) -> Declaration:
    """Describe the virtual cluster in a declaration, with times of steps that are measured once for each folder.

    The job's data file is made if it isn't there, for processes side by side can't share that.

    Raises:
        ConfigError: a setting breaks its rule.
    """
    job_path = Path(declared.job)
    with neighbours(job_path):
        job, config = runs.specify(job_path, None, declared.settings)
        make_data(job, Path(config.data.path))
        own = config.batch_size * config.accumulation
        cluster.steps(lambda given_s: given_s or 1.0).check(max(declared.ranks))
        described = {**cluster.model_dump(), "samples": own}
        step_s = _known(output, described) if cluster.measures else {}
        if step_s is None:
            stages = config.parallel.stages
            sizes = {own, *(own * max(1, ranks // stages) for ranks in declared.ranks if declared.controls)}
            step_s = {str(size): float(f"{measure_step(job, config, size):.3g}") for size in sorted(sizes)}
    return replace(declared, virtual={**described, "step_s": step_s})


def _known(output: Path, described: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the times that were measured for the comparison in a folder, if that is on the same cluster."""
    found = (read(output) or {}).get("virtual") or {}
    return found.get("step_s") if described.items() <= found.items() else None


@dataclass(frozen=True)
class Simulation:
    """All that runs on one virtual cluster share.

    Args:
        job: the job's file.
        cluster: as the user describes it.
        samples: of a step of one rank, for which the described times are right; a step of more takes longer.
        step_s: measured seconds, by the samples of a step.
        command: the words of the command line, for `run.json`.
    """

    job: str
    cluster: ClusterConfig
    samples: int
    step_s: Mapping[int, float]
    command: Sequence[str] = ()

    @classmethod
    def of(cls, declared: Declaration, command: Sequence[str] = ()) -> Simulation:
        """Read the cluster from a declaration that `on_cluster` has made."""
        described = dict(declared.virtual or {})
        step_s = {int(samples): seconds for samples, seconds in described.pop("step_s").items()}
        samples = described.pop("samples")
        return cls(declared.job, ClusterConfig.from_mapping(described, "cluster"), samples, step_s, tuple(command))

    def __str__(self) -> str:
        measured = ", ".join(f"{seconds * 1e3:.3g} ms for {size} samples" for size, seconds in self.step_s.items())
        steps = f"{measured}, as measured here with one thread" if measured else f"for {self.samples} samples"
        return f"virtual ranks, joined by {self.cluster.network}; steps: {self.cluster.compute}, {steps}"

    def train(self, run: PlannedRun, folder: Path) -> None:
        """Train a job on virtual ranks, as `hpcdist train` does on real ones; go on with a run that has checkpoints.

        Raises:
            HpcdistError: as that does.
        """
        cluster = ClusterConfig.from_mapping(load(self.cluster.model_dump(), None, run.cluster), "cluster")
        own = self._samples(run)
        compute = cluster.steps(lambda given_s: self._step_s(given_s, own))
        if isinstance(compute, Straggler) and compute.rank >= run.ranks:  # a control on fewer ranks
            compute = compute.base

        resume = (folder / "checkpoints").exists()

        def body(comm):
            return runs.train(comm, Path(self.job), None, run.overrides, folder, resume, command=self.command)

        if run.loop:
            body = load_function(run.loop, "loop")(load({}, None, run.overrides), folder)
        run_virtual(body, run.ranks, seed=run.seed, network=cluster.links(), compute=compute)

    def _samples(self, run: PlannedRun) -> int:
        """Return the samples of a step of one rank; of one that says how long its steps take, those of the cluster."""
        if run.loop or any(setting.startswith("compute=") for setting in run.cluster):
            return self.samples
        _, config = runs.specify(Path(self.job), None, run.overrides)
        return config.batch_size * config.accumulation

    def _step_s(self, given_s: float | None, samples: int) -> float:
        """Return the seconds of a step with so many samples."""
        if given_s is not None:
            return given_s * samples / self.samples
        nearest = min(self.step_s, key=lambda known: abs(known - samples))
        return self.step_s[nearest] * samples / nearest


class VirtualRuns:
    """Make runs on virtual ranks: here with one worker, else in that many processes.

    `make` may be called by as many threads at the same time.
    """

    def __init__(self, simulation: Simulation, workers: int = 1):
        self._simulation, self._ended = simulation, False
        self._processes = Processes(workers) if workers > 1 else None

    def make(self, run: PlannedRun, folder: Path) -> None:
        """Make a run.

        Raises:
            RunError: it failed.
        """
        try:
            work = (_train, self._simulation, run, folder)
            failure = self._processes.submit(*work).result() if self._processes else _train(*work[1:])
        except BrokenProcessPool:
            if self._ended:
                raise KeyboardInterrupt from None
            failure = "its process was killed: is there enough memory for so many virtual ranks? Give --workers 1"
        if failure is not None:
            raise RunError(f"run {run.folder} on virtual ranks failed: {failure}")

    def close(self) -> None:
        """End the processes, and with them the runs under way."""
        self._ended = True
        if self._processes is not None:
            self._processes.close()


def _train(simulation: Simulation, run: PlannedRun, folder: Path) -> str | None:
    """Make a run; return the reason where it failed, for errors don't all survive the way between processes."""
    try:
        simulation.train(run, folder)
    except HpcdistError as error:
        return str(error)
    except Exception:  # of the user's job
        return traceback.format_exc()
    return None
