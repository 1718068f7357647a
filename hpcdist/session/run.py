"""A loop of one's own as a run: in a folder, with the files that `hpcdist train` writes of a job."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

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
    note_step,
    now,
    read_records,
    record_path,
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

_log = logging.getLogger("hpcdist")
ENDING_S = 5.0  # that a killed run may still hold its folder when the next one goes on with it
INTERACTIVE = "interactive"  # in place of a script's path, in notebooks
LOG_EVERY = 20  # steps between figures for loggers
NO_ENERGY = Energy(joules=None, not_measured="it is not measured in a loop of one's own")


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
        """Return the strategy and the options of a DistributedOptimizer that the script gives these.

        Raises:
            ConfigError: the strategy, or an option, is another one than in the plan.
        """
        given = {"strategy": strategy, **options}
        for name, value in {"strategy": self.strategy, **self.options}.items():
            if given.get(name) not in (None, value):
                raise ConfigError(
                    f"{name} of DistributedOptimizer must be {value!r} in this run of a comparison or a sweep; got "
                    f"{given[name]!r}. Leave it out of the script, or let ARGS say it: --strategy {{strategy}}."
                )
        return self.strategy, {**options, **self.options}

    def require_own(self, path: str | os.PathLike[str]) -> None:
        """Raise ConfigError where a folder of checkpoints is not the run's own: other runs would go on from them."""
        if not Path(path).resolve().is_relative_to(Path(self.folder).resolve()):
            raise ConfigError(
                f"checkpoints must be in the folder of a run that a comparison or a sweep has planned, {self.folder}; "
                f"got {path}. Let ARGS say it: --checkpoints {{run}}/checkpoints."
            )


def _arguments(words: Sequence[str], folder: Path) -> dict[str, str]:
    """Return a script's arguments by name, so that reports tell runs apart; without paths in the run's folder."""
    found, name = {}, ""
    for place, word in enumerate(words, 1):
        if word.startswith("-") and not word.lstrip("-")[:1].isdigit():
            name, _, value = word.lstrip("-").partition("=")
            found[name] = value
        else:
            found[name or str(place)], name = word, ""
    home = folder.resolve()

    def is_path_inside(value: str) -> bool:  # a bare word is no path, unless it is the folder's own
        path = Path(value).resolve()
        return bool(value) and (path == home or (os.sep in value and path.is_relative_to(home)))

    return {name: value for name, value in found.items() if not is_path_inside(value)}


class LoopRun:
    """Write the run of the first DistributedOptimizer: records of each step, evaluations and, at the end, a summary.

    Collective, as are `start` and `finish`. The first rank holds the folder's lock, and writes `run.json`.

    Args:
        comm: all ranks of the job.
        folder: of the run. A run there that has not ended is gone on with.
        of_job: the folder is that of a batch job: the run gets one of its own in it, named after the script.
        log: loggers, as the setting `log` of a job.
        script: the file of the script, if this process began with another file.

    Attributes:
        wanted: the folder that the user gave.
        samples: of this rank's batches since its last step.
        of_all: samples of all ranks' batches since then.
        epochs: that have ended.
        reason: why the script leaves before the end, where it says so.

    Raises:
        ConfigError: a run has ended in the folder, it is another script's, or a process works in it.
    """

    def __init__(
        self, comm: Communicator, folder: Path, of_job: bool = False, log: tuple[str, ...] = (), script: str = ""
    ):
        self.wanted = folder
        self.samples = self.of_all = self.epochs = 0
        self.reason = "the script ended before hpcdist.finish"
        self.strategy: Any = None  # of the first DistributedOptimizer
        loggers.require(log)
        self._log = log
        self._curves: Curves | None = None
        self._comm, self._until_the_end = comm, ExitStack()
        self._script = Path(script or getattr(sys.modules["__main__"], "__file__", None) or INTERACTIVE)
        claim = self._claimed_in_job if of_job else self._claimed
        text = comm.gather(comm.raise_on_all_ranks(lambda: str(claim(folder)) if comm.rank == 0 else ""))[0]
        self.folder = Path(text)
        self._writer: RecordWriter | None = None
        self._sampler: Sampler | None = None
        self._workers: tuple[int, ...] = ()
        self._trained, self._seconds = 0, 0.0  # so far: samples of all ranks, and seconds of this rank's steps
        self._noted_s = 0.0  # when the last of them were counted
        self._early: list[dict[str, float]] = []  # metrics that were logged before the first step of this start
        self._seed = 0
        self._metrics: dict[str, float] = {}
        self._summary: dict[str, Any] | None = None  # what the records don't say, once the run has ended
        self._outcome: tuple[Outcome, str | None] | None = None
        if comm.platform.virtual is None:
            self._guard()

    # --- the folder ---------------------------------------------------------------------------------------------------
    def _claimed(self, folder: Path) -> Path:
        with making(folder, "run"):
            folder.mkdir(parents=True, exist_ok=True)
        self._until_the_end.enter_context(locked(folder, ENDING_S, "run"))
        before = load_run(folder)
        if (folder / SUMMARY).exists():
            self._refuse(f"in which no run has ended; got {folder}, where one has; `hpcdist runs rm` removes it")
        if before is not None and Path(before.job.path).name != self._script.name:
            self._refuse(f"of {self._script.name}, or a new one; got {folder}, which holds a run of {before.job.path}")
        return folder

    def _refuse(self, why: str) -> NoReturn:
        self._until_the_end.close()
        raise ConfigError(f"run must be a folder {why}. Give another name.")

    def _claimed_in_job(self, folder: Path) -> Path:
        """Claim the first folder of this script in which no run has ended and none is at work."""
        number = 1
        while True:
            own = folder / (self._script.stem if number == 1 else f"{self._script.stem}-{number}")
            with making(own, "HPCDIST_RUN"):
                own.mkdir(parents=True, exist_ok=True)  # else no number would do
            if not (own / SUMMARY).exists():
                with suppress(ConfigError):
                    return self._claimed(own)
            number += 1

    def _guard(self) -> None:
        """Write down how the run ends where the script does not come to `finish`."""
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            interrupted = issubclass(kind, KeyboardInterrupt)
            said = "Ctrl-C" if interrupted else f"{kind.__name__}: {error}".partition("\n")[0]
            self._end("interrupted" if interrupted else "failed", said)
            previous(kind, error, trace)

        sys.excepthook = hook
        atexit.register(lambda: self._end("interrupted", self.reason))

    def _end(self, outcome: Outcome, reason: str | None = None) -> None:
        """Close this rank's files, and write how the run has ended: the rank that fails, or the first one."""
        if self.strategy is not None and self._outcome is None:
            self._outcome = (outcome, reason)
            self._close()
            if outcome == "failed" or self._comm.rank == 0:
                with suppress(OSError):
                    end_run(self.folder, outcome, reason)
        self._until_the_end.close()
        self.close_loggers()

    def close_loggers(self) -> None:
        """Let the loggers write what is left; they take what is logged after `finish`, too."""
        if self._curves is not None:
            self._curves.close()
        self._curves = None

    def flush(self) -> None:
        """Write the records of all steps to the files, as those of a checkpoint's steps must be there."""
        if self._writer is not None and not self.has_ended:
            self._writer.flush()

    def _close(self) -> None:
        with suppress(OSError):
            if self._writer is not None:
                self._writer.close()
            if self._sampler is not None:
                self._sampler.close()

    # --- steps --------------------------------------------------------------------------------------------------------
    def start(self, optimizer: Any, workers: tuple[int, ...], settings: Mapping[str, Any]) -> bool:
        """Collective. Begin the run with the first DistributedOptimizer; tell whether it is this one.

        Args:
            workers: ranks that train.
            settings: of the strategy and the optimiser.

        Raises:
            ConfigError: a run with another strategy has begun in the folder, and has not ended.
        """
        if self.strategy is not None:
            return False
        comm = self._comm
        comm.raise_on_all_ranks(lambda: self._require_same(settings["strategy"]["name"]) if comm.rank == 0 else None)
        self.strategy, self._workers = optimizer.strategy, workers
        self._seed = torch.initial_seed() % (1 << 53)  # what a file holds exactly
        settings = {**settings, "seed": self._seed, "arguments": _arguments(sys.argv[1:], self.folder)}
        self.strategy.records.write = self.write
        self._curves = Curves(self._log, settings, comm, workers, optimizer, self.folder, ())
        start = describe_start(comm, self.folder, self._script, settings, command=list(sys.argv))
        if start is not None:
            start_run(self.folder, start)
            _log.info(f"this run is written to {self.folder}")
        comm.barrier()  # the other ranks' files follow
        if comm.platform.virtual is None:
            self._sampler = Sampler(resources_path(self.folder, comm.rank))
        return True

    def _require_same(self, strategy: str) -> None:
        before = load_run(self.folder)
        there = strategy if before is None else before.last.settings["strategy"]["name"]
        if there != strategy:
            self._refuse(f"of {strategy}, or a new one; got {self.folder}, whose run with {there} has not ended")

    @property
    def has_ended(self) -> bool:
        return self._outcome is not None

    @property
    def _is_main(self) -> bool:
        return self._comm.rank == first_alive(self._comm, self._workers)

    def write(self, record: StepRecord) -> None:
        """Write the record of a step, with the samples of its batches."""
        record = replace(record, samples=self.samples)
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
        self._noted_s = self._comm.now()

    def _open(self, step: int) -> RecordWriter:
        """Open this rank's records at the first step of this start: only now it is known where the run goes on."""
        path, rank = record_path(self.folder, self._comm.rank), self._comm.rank
        if self._is_main and step > 1:
            earlier = {of: [one for one in r if one.step < step] for of, r in read_records(self.folder).items()}
            self._trained = sum(one.samples for of_rank in earlier.values() for one in of_rank)
            self._seconds = sum(one.seconds for one in earlier.get(rank, ()))
        if rank == 0 and step > 1:
            note_step(self.folder, step - 1)
        writer = RecordWriter(path, first_step=step)
        if self._is_main:
            keep_evaluations(self.folder, step - 1)
        if self._curves is not None:
            self._curves.open(step)
        self._write_early(step - 1)
        return writer

    def _write_early(self, step: int) -> None:
        """Write what was logged before the first step of this start, which goes on from `step`."""
        early, self._early = self._early, []
        for metrics in filter(None, early) if self._is_main else ():
            self._evaluate(step, metrics)

    def end_epoch(self, epoch: int) -> None:
        """Note that so many epochs have ended, and the seconds since the last step: another optimiser's, say."""
        self.epochs = epoch
        if self._writer is not None:
            self._seconds += self._comm.now() - self._noted_s
            self._noted_s = self._comm.now()

    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Write an evaluation, on the first rank that trains; after `finish` the summary has it, too."""
        if not isinstance(metrics, Mapping):
            raise ConfigError(f"metrics must be numbers by their names; got {metrics!r}. Write {{'accuracy': 0.97}}.")
        found = {name: _number(name, value) for name, value in metrics.items()}
        if self._writer is None and not self.has_ended:
            self._early.append(found)  # on all ranks: which of them trains may not be known yet
        elif self._is_main and found:
            self._evaluate(self.strategy.steps, found)
            if self._summary is not None:
                self._write_summary()

    def _evaluate(self, step: int, metrics: dict[str, float]) -> None:
        self._metrics = metrics
        if self._curves is not None:
            self._curves.evaluate(step, metrics)
        append_evaluation(self.folder, Evaluation(step, self.epochs, self._trained, self._seconds, metrics))

    # --- the end ------------------------------------------------------------------------------------------------------
    def finish(self, params: Sequence[Tensor], stages: int) -> None:
        """Collective. End the run: its summary is written, with the metrics that were logged last.

        Args:
            params: this rank's part of the trained model.
            stages: ranks that hold one model together.
        """
        comm = self._comm
        self._write_early(self.strategy.steps)  # where no step was taken
        pending = comm.gather(self.strategy.records.pending())
        sums = comm.gather(digest(params))[:stages]
        self._close()
        comm.barrier()  # all records are in the files
        if self._is_main:
            self._summary = {
                "strategy": name_of(self.strategy), "ranks": comm.size, "stages": stages, "wall_s": self._seconds,
                "seed": self._seed, "workers": len(self._workers) // stages,
                "sha256": sums[0] if stages == 1 else hashlib.sha256("".join(sums).encode()).hexdigest(),
                "pending": sum(filter(None, pending)), "lost_ranks": list(comm.failures.lost), "energy": NO_ENERGY,
            }  # fmt: skip
            self._write_summary()
        self._outcome = ("ended", None)
        if comm.rank == 0:
            end_run(self.folder)
        self._until_the_end.close()
        if comm.platform.virtual is not None:
            self.close_loggers()  # no process ends with a virtual rank

    def _write_summary(self) -> None:
        write_summary(self.folder, summarise(read_records(self.folder), metrics=self._metrics, **(self._summary or {})))


def next_run(run: LoopRun | None, comm: Communicator, folder: Path, log: tuple[str, ...]) -> LoopRun:
    """Return the run that a script wants: the one that is under way, or a new one.

    Raises:
        ConfigError: another one is under way; or as of `LoopRun`.
    """
    if run is None or run.has_ended:
        if run is not None:
            run.close_loggers()
        return LoopRun(comm, folder, log=log)
    if run.wanted != folder:
        raise ConfigError(
            f"run must stay {run.wanted} until hpcdist.finish has ended that run; got {folder}. Finish the model first."
        )
    return run


def _number(name: object, value: Any) -> float:
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
    """Collective. Describe a start of a run, and copy the script and what it imports to the folder.

    Args:
        further: fields of `Start`.

    Returns:
        None but on the first rank, which writes it down.
    """
    found = comm.gather(local_cores_of_host())
    if comm.rank != comm.failures.alive[0]:
        return None
    home = script.resolve().parent
    revision, dirty = git_commit(home)
    is_file, installed = script.is_file(), {"site-packages", "dist-packages"} & set(home.parts)
    beside = [] if installed else imported_from_same_folder(script)
    return Start(
        started=now(),
        job=copy_job(folder, script, beside) if is_file else JobFile(path=str(script), sha256="", copies={}),
        commit=revision,
        dirty=dirty,
        ranks=comm.size,
        hosts=[host for host, _ in found],
        cores=cores_by_host(found),
        processors=os.cpu_count(),
        load=load_average(),
        versions=versions(comm),
        settings=dict(settings),
        virtual=None if comm.platform.virtual is None else json.loads(json.dumps(comm.platform.virtual, default=str)),
        **further,
    )


def required_versions(comm: Communicator) -> dict[str, str]:
    """Return the versions that all ranks must have in common: of Python its first two numbers."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"hpcdist": __version__, "torch": torch.__version__, "mpi": comm.platform.library, "python": python}


def versions(comm: Communicator) -> dict[str, str | None]:
    """Return the versions of hpcdist, Python and the libraries beneath; MPI's is None on virtual ranks."""
    mpi = None if comm.mpi is None else comm.platform.library
    return {**required_versions(comm), "numpy": np.__version__, "python": platform.python_version(), "mpi": mpi}
