"""Write the run of a user's training loop to a folder, in the files that `hpcdist train` writes for a job."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.config.files import git_commit, imported_from_same_folder
from hpcdist.errors import ConfigError
from hpcdist.records import (
    Evaluation,
    JobFile,
    Outcome,
    RecordWriter,
    Sampler,
    Start,
    StepRecord,
    append_evaluation,
    continue_records,
    copy_job,
    cores_by_host,
    digest,
    end_run,
    keep_evaluations,
    load_average,
    load_run,
    local_cores_of_host,
    locked,
    making,
    now,
    read_records,
    record_files,
    record_first_step,
    resources_path,
    start_run,
    summarise,
    write_summary,
)
from hpcdist.records.energy import Energy
from hpcdist.records.summary import FILE_NAME as SUMMARY
from hpcdist.session import loggers
from hpcdist.session.curves import Curves, first_alive
from hpcdist.strategies.base import name_of
from hpcdist.version import __version__

T = TypeVar("T")
_log = logging.getLogger("hpcdist")
ENDING_S = 5.0  # wait for a killed run that still holds the folder's lock
INTERACTIVE = "interactive"  # instead of a script's path, in notebooks
LOG_EVERY = 20  # steps between metrics for loggers
NO_ENERGY = Energy(joules=None, not_measured="it is not measured in a user's own training loop")


@dataclass(frozen=True)
class PlannedLoop:
    """A run of a script that a comparison or a sweep has planned.

    Attributes:
        script: its file.
        folder: of the run.
        strategy: which trains, by these options and those of the script.
    """

    script: str
    folder: str
    strategy: str
    options: Mapping[str, Any]

    def chosen(self, strategy: str | None, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the strategy and options for a DistributedOptimizer that the script calls with these.

        Raises:
            ConfigError: the script's strategy, or an option, differs from the plan.
        """
        options_of_script = {"strategy": strategy, **options}
        for name, value in {"strategy": self.strategy, **self.options}.items():
            if options_of_script.get(name) not in (None, value):
                raise ConfigError(
                    f"{name} of DistributedOptimizer must be {value!r} in this run of a comparison or a sweep; got "
                    f"{options_of_script[name]!r}. Remove it from the script, or use ARGS: --strategy {{strategy}}."
                )
        return self.strategy, {**options, **self.options}

    def require_inside(self, path: str | os.PathLike[str]) -> None:
        """Raise ConfigError if a folder of checkpoints is outside of the run's: other runs would resume from them."""
        if not Path(path).resolve().is_relative_to(Path(self.folder).resolve()):
            raise ConfigError(
                f"checkpoints must be in the folder of a run that a comparison or a sweep has planned, {self.folder}; "
                f"got {path}. Use ARGS: --checkpoints {{run}}/checkpoints."
            )


def arguments_by_name(argv: Sequence[str], folder: Path) -> dict[str, str]:
    """Return a script's arguments by name or position, to distinguish runs in reports, without paths in `folder`."""
    result, name = {}, ""
    for position, argument in enumerate(argv, 1):
        if argument.startswith("-") and not argument.lstrip("-")[:1].isdigit():
            name, _, value = argument.lstrip("-").partition("=")
            result[name] = value
        else:
            result[name or str(position)], name = argument, ""
    run_folder = folder.resolve()

    def is_path_inside(value: str) -> bool:  # a single word is a path only if it is the folder itself
        path = Path(value).resolve()
        return bool(value) and (path == run_folder or (os.sep in value and path.is_relative_to(run_folder)))

    return {name: value for name, value in result.items() if not is_path_inside(value)}


class LoopRun:
    """Writes the run of the first DistributedOptimizer: a record of each step, evaluations, and a summary at the end.

    Collective, as are `start` and `finish`. The first rank holds the folder's lock, and writes `run.json`.

    Args:
        comm: all ranks of the job.
        folder: of the run. An unfinished run in it is continued.
        of_job: `folder` is that of a batch job; the run gets a subfolder named after the script.
        log: loggers, as in a job's setting `log`.
        script: the script's file, if it is not the process's main file.

    Attributes:
        requested: the folder that the user passed.
        samples: of this rank's batches since its last step.
        of_all: samples of all ranks' batches since then.
        epochs: number of finished epochs.
        reason: why the script stops early, if known.

    Raises:
        ConfigError: the folder has a finished run, or a run of another script, or is locked by a process.
    """

    def __init__(
        self, comm: Communicator, folder: Path, of_job: bool = False, log: tuple[str, ...] = (), script: str = ""
    ):
        self.requested = folder
        self.samples = self.of_all = self.epochs = 0
        self.reason = "the script ended before hpcdist.finish"
        self.strategy: Any = None  # of the first DistributedOptimizer
        loggers.require(log)
        self._log = log
        self._curves: Curves | None = None
        self._comm, self._until_the_end = comm, ExitStack()
        self._script = Path(script or getattr(sys.modules["__main__"], "__file__", None) or INTERACTIVE)
        claim = self._claimed_in_job if of_job else self._claimed
        self.folder = Path(on_rank_0(comm, lambda: str(claim(folder))))
        self._writer: RecordWriter | None = None
        self._sampler: Sampler | None = None
        self._workers: tuple[int, ...] = ()
        self._trained, self._seconds = 0, 0.0  # so far: samples of all ranks, and seconds of this rank's steps
        self._counted_s = 0.0  # time until which `_seconds` is counted
        self._early: list[dict[str, float]] = []  # metrics logged before this start's first step
        self._seed = 0
        self._metrics: dict[str, float] = {}
        self._summary: dict[str, Any] | None = None  # fields that records lack, once the run has ended
        self._outcome: tuple[Outcome, str | None] | None = None
        if comm.platform.virtual is None:
            self._guard()

    # --- the folder ---------------------------------------------------------------------------------------------------
    def _claimed(self, folder: Path) -> Path:
        """Lock the run's folder, and check that it has no finished run and none of another script."""
        self._until_the_end.enter_context(locked(folder, ENDING_S, "run"))
        earlier = load_run(folder)
        if (folder / SUMMARY).exists():
            self._refuse(f"in which no run has ended; got {folder}, where one has; `hpcdist runs rm` removes it")
        if earlier is not None and Path(earlier.job.path).name != self._script.name:
            self._refuse(f"of {self._script.name}, or a new one; got {folder}, which holds a run of {earlier.job.path}")
        return folder

    def _refuse(self, why: str) -> NoReturn:
        self._until_the_end.close()
        raise ConfigError(f"run must be a folder {why}. Give another name.")

    def _claimed_in_job(self, folder: Path) -> Path:
        """Claim the first folder of this script without a finished or an active run."""
        number = 1
        while True:
            subfolder = folder / (self._script.stem if number == 1 else f"{self._script.stem}-{number}")
            with making(subfolder, "HPCDIST_RUN"):
                subfolder.mkdir(parents=True, exist_ok=True)  # raises here, because the next number would fail too
            if not (subfolder / SUMMARY).exists():
                with suppress(ConfigError):
                    return self._claimed(subfolder)
            number += 1

    def _guard(self) -> None:
        """Write how the run ended if the script never calls `finish`."""
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            self._end(*outcome_of(error))
            previous(kind, error, trace)

        sys.excepthook = hook
        atexit.register(lambda: self._end("interrupted", self.reason))

    def _end(self, outcome: Outcome, reason: str | None = None) -> None:
        """Close this rank's files; the failing rank, or the first one, writes how the run ended."""
        if self.strategy is not None and self._outcome is None:
            self._outcome = (outcome, reason)
            self._close()
            if outcome == "failed" or self._comm.rank == 0:
                with suppress(OSError):
                    end_run(self.folder, outcome, reason)
        self._until_the_end.close()
        self.close_loggers()

    def close_loggers(self) -> None:
        """Wait for the loggers, which write metrics that are logged after `finish` too."""
        if self._curves is not None:
            self._curves.close()
        self._curves = None

    def flush(self) -> None:
        """Write the records of all steps to the files, before a checkpoint is saved."""
        if self._writer is not None and not self.has_ended:
            self._writer.flush()

    def _close(self) -> None:
        with suppress(OSError):
            if self._writer is not None:
                self._writer.close()
            if self._sampler is not None:
                self._sampler.close()

    # --- steps --------------------------------------------------------------------------------------------------------
    def start(self, optimizer: Any, workers: tuple[int, ...], settings: Mapping[str, Any], stages: int) -> bool:
        """Collective. Start the run with the first DistributedOptimizer; return whether `optimizer` is the first.

        Args:
            workers: ranks that train.
            settings: of the strategy and the optimiser.
            stages: number of ranks that jointly hold one model.

        Raises:
            ConfigError: the folder has an unfinished run with another strategy.
        """
        if self.strategy is not None:
            return False
        comm = self._comm
        comm.raise_on_all_ranks(lambda: self._require_same(settings["strategy"]["name"]) if comm.rank == 0 else None)
        self.strategy, self._workers = optimizer.strategy, workers
        self._seed = torch.initial_seed() % (1 << 53)  # JSON holds it exactly
        settings = {**settings, "seed": self._seed, "arguments": arguments_by_name(sys.argv[1:], self.folder)}
        settings |= {"parallel": {"stages": stages}} if stages > 1 else {}
        self.strategy.records.write = self.write
        self._curves = Curves(self._log, settings, comm, workers, optimizer, self.folder, ())
        start = describe_start(comm, self.folder, self._script, settings, command=list(sys.argv))
        if start is not None:
            start_run(self.folder, start)
            _log.info(f"this run is written to {self.folder}")
        comm.barrier()  # before other ranks write files
        if comm.platform.virtual is None:
            self._sampler = Sampler(resources_path(self.folder, comm.rank))
        return True

    def _require_same(self, strategy: str) -> None:
        """Raise ConfigError if the folder has an unfinished run with another strategy."""
        earlier = load_run(self.folder)
        saved = strategy if earlier is None else earlier.last.settings["strategy"]["name"]
        if saved != strategy:
            self._refuse(f"of {strategy}, or a new one; got {self.folder}, whose run with {saved} has not ended")

    @property
    def has_ended(self) -> bool:
        return self._outcome is not None

    @property
    def _is_main(self) -> bool:
        return self._comm.rank == first_alive(self._comm, self._workers)

    def write(self, record: StepRecord) -> None:
        """Write the record of a step, with the samples of its batches."""
        record = replace(record, samples=self.samples * self.strategy.records.is_logging)
        if self._writer is None:
            self._writer = self._open(record.step)
        self._writer.write(record)
        if self._curves is not None:
            self._curves.add(record)
            if record.step % LOG_EVERY == 0:
                self._curves.report()
        self._trained += self.of_all
        self.samples = self.of_all = 0
        self._seconds += record.seconds
        self._counted_s = self._comm.now()

    def _open(self, step: int) -> RecordWriter:
        """Open this rank's records, after the first step of this start: before it, that step's number is unknown."""
        rank = self._comm.rank
        records = read_records(self.folder) if self._is_main and record_files(self.folder) else {}
        if step == 1 and (former := max((each.step for each in records.get(rank, ())), default=0)):
            _log.warning(
                "%s was at step %d; it starts again at step 0, and its former steps no longer count. To continue it, "
                "call hpcdist.load with a checkpoint before the first step; to keep it, name another folder.",
                self.folder, former,
            )  # fmt: skip
        if self._is_main and step > 1:
            saved = dict(enumerate(self.strategy.records.saved))
            earlier = {of: [each for each in r if each.step <= saved.get(of, step - 1)] for of, r in records.items()}
            self._trained = sum(each.samples for of_rank in earlier.values() for each in of_rank)
            self._seconds = sum(each.seconds for each in earlier.get(rank, ()))
        if rank == 0 and step > 1:
            record_first_step(self.folder, step - 1)
        writer = continue_records(self.folder, rank, self._comm.size, step, self.strategy.records.saved)
        if self._is_main:
            keep_evaluations(self.folder, step - 1)
        if self._curves is not None:
            self._curves.open(step)
        self._write_early(step - 1)
        return writer

    def _write_early(self, step: int) -> None:
        """Write metrics that were logged before this start's first step, `step` + 1."""
        early, self._early = self._early, []
        for metrics in filter(None, early) if self._is_main else ():
            self._evaluate(step, metrics)

    def end_epoch(self, epoch: int) -> None:
        """Set the number of finished epochs, and count the seconds since the last step."""
        self.epochs = epoch
        if self._writer is not None:
            self._seconds += self._comm.now() - self._counted_s
            self._counted_s = self._comm.now()

    def log_metrics(self, values: dict[str, float]) -> None:
        """Write an evaluation, on the first worker; after `finish` to the summary too."""
        if self._writer is None and not self.has_ended:
            self._early.append(values)  # on all ranks: the first worker may not be known yet
        elif self._is_main and values:
            self._evaluate(self.strategy.steps, values)
            if self._summary is not None:
                self._write_summary()

    def _evaluate(self, step: int, metrics: dict[str, float]) -> None:
        self._metrics = metrics
        if self._curves is not None:
            self._curves.evaluate(step, metrics)
        append_evaluation(self.folder, Evaluation(step, self.epochs, self._trained, self._seconds, metrics))

    # --- the end ------------------------------------------------------------------------------------------------------
    def finish(self, params: Sequence[Tensor], stages: int) -> None:
        """Collective. End the run: write its summary, with the metrics that were logged last.

        Args:
            params: this rank's part of the trained model.
            stages: number of ranks that jointly hold one model.
        """
        comm = self._comm
        self._write_early(self.strategy.steps)  # if no step was taken
        pending = comm.gather(self.strategy.records.pending())
        digests = comm.gather(digest(params))[:stages]
        self._close()
        comm.barrier()  # all records are in the files
        if self._is_main:
            self._summary = {
                "strategy": name_of(self.strategy), "ranks": comm.size, "stages": stages, "wall_s": self._seconds,
                "seed": self._seed, "workers": len(self._workers) // stages,
                "sha256": digests[0] if stages == 1 else hashlib.sha256("".join(digests).encode()).hexdigest(),
                "pending": sum(filter(None, pending)), "lost_ranks": list(comm.failures.lost), "energy": NO_ENERGY,
            }  # fmt: skip
            self._write_summary()
        self._outcome = ("ended", None)
        if comm.rank == 0:
            end_run(self.folder)
        self._until_the_end.close()
        if comm.platform.virtual is not None:
            self.close_loggers()  # virtual ranks run no exit handlers

    def _write_summary(self) -> None:
        write_summary(self.folder, summarise(read_records(self.folder), metrics=self._metrics, **(self._summary or {})))


def on_rank_0(comm: Communicator, work: Callable[[], T]) -> T:
    """Collective. Run `work` on rank 0, because other nodes may see a folder later; return its result on all ranks."""
    result: T = comm.gather(comm.raise_on_all_ranks(lambda: work() if comm.rank == 0 else None))[0]
    return result


def outcome_of(error: BaseException) -> tuple[Outcome, str]:
    """Return the outcome of a run that an exception ended, and the reason."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "Ctrl-C"
    return "failed", f"{type(error).__name__}: {error}".partition("\n")[0]


def next_run(run: LoopRun | None, comm: Communicator, folder: Path, log: tuple[str, ...]) -> LoopRun:
    """Return the active run if its folder is `folder`, else a new run; raise ConfigError if another run is active."""
    if run is None or run.has_ended:
        if run is not None:
            run.close_loggers()
        return LoopRun(comm, folder, log=log)
    if run.requested != folder:
        raise ConfigError(
            f"run must stay {run.requested} until hpcdist.finish has ended that run; got {folder}. Finish the model "
            "first."
        )
    return run


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Convert metrics to floats; raise ConfigError if they are none, or have bad names."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics must be numbers by their names; got {metrics!r}. Write {{'accuracy': 0.97}}.")
    return {name: _number(name, value) for name, value in metrics.items()}


def _number(name: object, value: Any) -> float:
    """Convert a metric to a float; raise ConfigError for a bad name or value."""
    if not (isinstance(name, str) and name.strip() and name.isprintable()):
        raise ConfigError(f"metrics must have names of one line; got {name!r}. Rename it.")
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"metrics must be numbers by their names; got {type(value).__name__} for {name!r}. Pass one number, as "
            "hpcdist.metric returns it."
        ) from None


def describe_start(
    comm: Communicator, folder: Path, script: Path, settings: Mapping[str, Any], **further: Any
) -> Start | None:
    """Collective. Describe a start of a run, and copy the script and the files that it imports to the folder.

    Args:
        further: fields of `Start`.

    Returns:
        None except on the first rank, which writes it.
    """
    cores = comm.gather(local_cores_of_host())
    if comm.rank != comm.failures.alive[0]:
        return None
    home = script.resolve().parent
    revision, dirty = git_commit(home)
    is_file, installed = script.is_file(), {"site-packages", "dist-packages"} & set(home.parts)
    imported = [] if installed else imported_from_same_folder(script)
    return Start(
        started=now(),
        job=copy_job(folder, script, imported) if is_file else JobFile(path=str(script), sha256="", copies={}),
        commit=revision, dirty=dirty, ranks=comm.size, hosts=[host for host, _ in cores], cores=cores_by_host(cores),
        processors=os.cpu_count(), load=load_average(), versions=versions(comm), settings=dict(settings),
        virtual=None if comm.platform.virtual is None else json.loads(json.dumps(comm.platform.virtual, default=str)),
        **further,
    )  # fmt: skip


def required_versions(comm: Communicator) -> dict[str, str]:
    """Return the versions that must be equal on all ranks; of Python, major and minor version."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"hpcdist": __version__, "torch": torch.__version__, "mpi": comm.platform.library, "python": python}


def versions(comm: Communicator) -> dict[str, str | None]:
    """Return the versions of hpcdist, Python and its libraries; MPI's is None on virtual ranks."""
    mpi = None if comm.mpi is None else comm.platform.library
    return {**required_versions(comm), "numpy": np.__version__, "python": platform.python_version(), "mpi": mpi}
