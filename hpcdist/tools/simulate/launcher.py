"""The launcher of virtual ranks: runs in this process, or several concurrently in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hpcdist.comm.virtual import ComputeModel, SlowSteps, Straggler, run_virtual
from hpcdist.config.files import load_function
from hpcdist.config.merge import load
from hpcdist.errors import HpcdistError, RunError
from hpcdist.tools.compare import trials
from hpcdist.tools.compare.experiment import Experiment
from hpcdist.tools.compare.plan import PlannedRun
from hpcdist.tools.simulate.cluster import ClusterConfig
from hpcdist.train import runs

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Simulation:
    """The virtual cluster and the job of several runs.

    Args:
        job: the job's file.
        cluster: as the user describes it.
        samples: samples in a step that takes `cluster.compute`; larger ones take proportionally longer. 0: no scaling.
        step_s: measured seconds of a step, by its number of samples; empty if none was measured.
        command: the command line, for `run.json`.
    """

    job: str
    cluster: ClusterConfig
    samples: int
    step_s: Mapping[int, float]
    command: Sequence[str] = ()

    @classmethod
    def of(cls, experiment: Experiment, command: Sequence[str] = ()) -> Simulation:
        """Create the simulation of an experiment that has its `virtual` cluster, and step times, from `on_cluster`."""
        described = dict(experiment.virtual or {})
        step_s = {int(samples): seconds for samples, seconds in described.pop("step_s").items()}
        samples = described.pop("samples")
        return cls(experiment.job, ClusterConfig.from_mapping(described, "cluster"), samples, step_s, tuple(command))

    def __str__(self) -> str:
        measured = ", ".join(f"{seconds * 1e3:.3g} ms for {size} samples" for size, seconds in self.step_s.items())
        steps = f"{measured}, as measured here with one thread" if measured else f"for {self.samples} samples"
        steps = steps if self.samples else "for any batch size"  # a script
        return f"virtual ranks, joined by {self.cluster.network}; steps: {self.cluster.described()}, {steps}"

    def train(self, run: PlannedRun, folder: Path, script: Callable[..., None] | None = None) -> None:
        """Train a job on virtual ranks, as `hpcdist train` does on real ones; resume a run that has checkpoints.

        Args:
            script: called with each rank's communicator, instead of the job's training.

        Raises:
            HpcdistError: as `hpcdist train` does.
        """
        cluster = ClusterConfig.from_mapping(load(self.cluster.model_dump(), None, run.cluster), "cluster")
        step_samples = self._samples(run) if script is None else 0
        compute = _among(cluster.steps(lambda given_s: self._step_s(given_s, step_samples)), run.ranks)
        resume = (folder / "checkpoints").exists()

        def body(comm: Any) -> Any:
            if run.by_folder:
                return trials.train(comm, folder, command=self.command)
            return runs.train(comm, Path(self.job), None, run.overrides, folder, resume, command=self.command)

        if run.loop:
            body = load_function(run.loop, "loop")(load({}, None, run.overrides), folder)
        run_virtual(script or body, run.ranks, seed=run.seed, network=cluster.links(), compute=compute)

    def _samples(self, run: PlannedRun) -> int:
        """Return the samples of a rank's step; `self.samples`, for no scaling, if the run sets the step times."""
        if run.loop or any(setting.startswith("compute=") for setting in run.cluster):
            return self.samples
        _, config = runs.specify(Path(self.job), None, run.overrides)
        return config.batch_size * config.accumulation

    def _step_s(self, given_s: float | None, samples: int) -> float:
        """Return the seconds of a step with this number of samples; `given_s`: of one with `self.samples`, if known."""
        if given_s is not None:
            return given_s * samples / self.samples if self.samples else given_s
        nearest = min(self.step_s, key=lambda size: abs(size - samples))
        return self.step_s[nearest] * samples / nearest


def _among(model: ComputeModel, ranks: int) -> ComputeModel:
    """Return a compute model without the stragglers that a serial control, on fewer ranks, does not have."""
    if not isinstance(model, (Straggler, SlowSteps)):
        return model
    base = _among(model.base, ranks)
    return base if isinstance(model, Straggler) and model.rank >= ranks else replace(model, base=base)


class VirtualLauncher(AbstractContextManager["VirtualLauncher"]):
    """Execute runs on virtual ranks, in this process or in `workers` processes, each with one thread.

    As many threads may call `run`. Only this process handles signals that end a program, and ends the workers: Ctrl-C
    in a terminal goes to all processes, and each would print a traceback. Workers also end if this process is killed.
    """

    def __init__(self, simulation: Simulation, workers: int = 1):
        self._simulation, self._ended = simulation, False
        self._pool: ProcessPoolExecutor | None = None
        if workers > 1:
            context = multiprocessing.get_context("spawn")  # fork would inherit torch's threads and locks
            self._pool = ProcessPoolExecutor(workers, context, initializer=_start)

    def run(self, run: PlannedRun, folder: Path) -> None:
        """Execute a run; raise RunError if it fails."""
        if self._pool is None:
            failure = _train(self._simulation, run, folder)
        else:
            try:
                old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # inherited by processes started here
                try:
                    future = self._pool.submit(_train, self._simulation, run, folder)
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
                failure = future.result()
            except BrokenProcessPool:
                if self._ended:
                    raise KeyboardInterrupt from None
                failure = f"its process was killed: is there enough memory for {run.ranks} ranks? Try --workers 1"
        if failure is not None:
            raise RunError(f"run {run.folder} on virtual ranks failed: {failure}")

    def __exit__(self, *failure: object) -> None:
        """Kill the worker processes, and with them their runs."""
        self._ended = True
        if self._pool is not None:
            processes = list((self._pool._processes or {}).values())
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()


def _train(simulation: Simulation, run: PlannedRun, folder: Path) -> str | None:
    """Execute a run; return the reason if it failed, because not every exception can be pickled."""
    try:
        simulation.train(run, folder)
    except HpcdistError as error:
        return str(error)
    except Exception:  # in the user's job
        return traceback.format_exc()
    return None


def _start() -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os._exit(1)
