"""Run a job in a folder to its end, from a job file, settings and flags; write down what it ran with."""

from __future__ import annotations

import glob
import inspect
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from hpcdist import checkpoint, strategies
from hpcdist.checkpoint.folder import clean
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.traced import end_timeline, start_timeline
from hpcdist.config import JobConfig, describe_changes, load
from hpcdist.config.files import neighbours, not_ending
from hpcdist.config.merge import Changes
from hpcdist.config.optimizer import with_functions_of
from hpcdist.errors import ConfigError, suggestion
from hpcdist.parallel.cut import cut_of
from hpcdist.parallel.layers import outline
from hpcdist.parallel.schedules import create as create_schedule
from hpcdist.records import (
    Outcome,
    Summary,
    end_run,
    locked,
    making,
    merged_timeline,
    start_run,
)
from hpcdist.records.timeline import unused
from hpcdist.registry import label
from hpcdist.session import loggers
from hpcdist.session.run import describe_start
from hpcdist.session.world import require_same_files
from hpcdist.train.changes import all_settings, changes_since
from hpcdist.train.early_stopping import EarlyStopping
from hpcdist.train.interruption import Interruption
from hpcdist.train.job import Job, load_job
from hpcdist.train.log import Progress
from hpcdist.train.loop import Trainer
from hpcdist.train.resume import saved_cut

ENDING_S = 5.0  # that a killed run may still hold its folder when the next one resumes
NUMBERS = ".numbers"  # beside runs: a file of the name of the last run of each job, strategy and number of ranks
_logger = logging.getLogger(__name__)


def train(
    comm: Communicator,
    job_path: Path,
    toml_path: Path | None = None,
    overrides: Sequence[str] = (),
    output: Path | None = None,
    resume: bool = False,
    show: Callable[[str, Progress], None] | None = None,
    ends_at: float | None = None,
    command: Sequence[str] = (),
    make: Callable[..., Any] = Trainer,
    timeline: bool = False,
    allow_changes: bool = False,
    environment: Mapping[str, str] = MappingProxyType({}),
    judge: Callable[[Path], str | None] | None = None,
) -> tuple[Path, Summary | None]:
    """Collective. Run a job to its end; return its folder and its summary, the same on all ranks.

    The summary is None if the run has left early, on a signal or before `ends_at`, with a checkpoint.

    Args:
        toml_path, overrides: settings over the job's defaults.
        output: the run's folder; None makes a new one in the configured folder.
        resume: go on from the newest whole checkpoint in `output`, or start anew if there is none.
        show: called with the strategy's name and the progress, on the first living rank.
        ends_at: when the job will be ended from outside, in seconds since 1970; None if never or unknown.
        command, environment: words of the command line, which the run's folder keeps, and this process's environment;
            both make the command that goes on with the run.
        make: makes the trainer, from the arguments of Trainer.
        timeline: write `timeline.json`, or `timeline-2.json`... if the run is resumed.
        allow_changes: go on also with other settings than those of the checkpoint.
        judge: called with the run's folder, on the first living rank, after each evaluation but the last; a text ends
            the run there, and the summary's `stopped_early` says it.

    Raises:
        ConfigError: a setting breaks its rule, the folder holds another run, or another process works in it; a resumed
            run would train with other settings than its checkpoint's, or on other data; the job's code calls sys.exit.
        MismatchError: ranks have other files of the job, other data, or other settings.
    """
    if allow_changes and not resume:
        raise ConfigError("--resume must be given with --allow-changes; got none. It goes on with a run that is there.")
    with _staying(job_path), ExitStack() as until_the_end:
        until_the_end.enter_context(neighbours(job_path))  # the job's functions may import them later
        job, config = comm.raise_on_all_ranks(lambda: specify(job_path, toml_path, overrides))
        require_same_files(comm)
        folder = cast(Path, _decided(comm, lambda: _choose(job_path, config, comm.size, output, resume, until_the_end)))
        if timeline:
            path = _decided(comm, lambda: unused(folder / merged_timeline.FILE_NAME))
            comm = start_timeline(comm, cast(Path, path))
        report = None if show is None else lambda progress: show(config.strategy.name, progress)
        if resume and config.parallel.measures:
            config = _with_saved_cut(comm, config, Path(config.checkpoint.folder or folder / "checkpoints"))
        judged, listens = None if judge is None else partial(judge, folder), comm.platform.virtual is None
        trainer = make(job, config, comm, folder, report, ends_at=ends_at, listens=listens, judge=judged)
        newest, changed = _newest(trainer, allow_changes) if resume else (None, {})
        write_down(trainer, job_path, command, newest, changed)
        leads = comm.rank == comm.failures.alive[0]
        if leads and output is None:
            _keep_number(folder)
        pids = getattr(comm, "pids", None)
        processes = {rank: pids[rank] for rank in comm.memory.local_ranks} if pids else {}
        interruption = Interruption(folder, trainer.checkpoints, command, environment, comm.size, processes)
        if trainer.leaving is not None and leads:
            trainer.leaving.heard = interruption.heard
        try:
            summary = trainer.run(newest and newest[0])
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            with suppress(OSError):
                _end(comm, folder, *_outcome(error))
                if comm.trace.timeline is not None:
                    comm.trace.timeline.close()
            raise
        reason = None if trainer.leaving is None else trainer.leaving.reason
        _end(comm, folder, "interrupted" if summary is None else "ended", reason)
        if comm.trace.timeline is not None:
            end_timeline(comm)
        if summary is None and leads:
            interruption.left(trainer.position.step, str(reason))
        trainer.close()
    return folder, summary


def _staying(job_path: Path) -> AbstractContextManager[None]:
    advice = "Raise an exception to fail. A run ends early by stop.patience, epochs or budget."
    return not_ending(job_path, "while its run is under way", advice)


def _end(comm: Communicator, folder: Path, outcome: Outcome, reason: str | None) -> None:
    if comm.rank == comm.failures.alive[0]:
        end_run(folder, outcome, reason)


def _outcome(error: BaseException) -> tuple[Outcome, str]:
    """Return how a run ended that an exception has ended, and why."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "Ctrl-C"
    return "failed", f"{type(error).__name__}: {error}".partition("\n")[0]


def _decided(comm: Communicator, work: Callable[[], Path | None]) -> Path | None:
    """Collective. Run `work` on rank 0, as other nodes may see a shared folder later; return its result on all."""
    path = comm.raise_on_all_ranks(lambda: work() if comm.rank == 0 else None)
    text = comm.gather(str(path or ""))[0]
    return Path(text) if text else None


def specify(job_path: Path, toml_path: Path | None, overrides: Sequence[str]) -> tuple[Job, JobConfig]:
    """Load a job and its settings, checked as far as one process can."""
    job = load_job(job_path)
    given = load({}, toml_path, overrides)
    if not isinstance(job.data, Mapping):
        own = {"path": f"data/{job_path.stem}.h5", **job.defaults.get("data", {})}
        job = replace(job, defaults={**job.defaults, "data": own})
    defaults = dict(job.defaults)
    budget = given.get("budget")
    if "epochs" not in given and isinstance(budget, Mapping) and any(limit != "none" for limit in budget.values()):
        defaults.pop("epochs", None)  # the budget replaces the job's own number of epochs
    values = load(defaults, toml_path, overrides)
    if "schedule" in values:
        values["schedule"] = with_functions_of(job_path, values["schedule"])
    config = JobConfig(**values)
    strategies.load(config.strategy.name).Config.from_mapping(config.strategy.options, "strategy")  # before any folder
    loggers.require(config.log)
    EarlyStopping(job, config)
    if config.data.prefetch and config.data.path is None:
        raise ConfigError(
            f"data.prefetch must be 0 with torch Datasets, as a thread would draw from the model's random numbers; got "
            f"{config.data.prefetch}. Set data.num_workers, a number of processes."
        )
    _check_model(job, config)
    if not config.parallel.whole:
        with _staying(job_path):  # it makes the model's layers
            _check_stages(job, config)
    return job, config


def _check_model(job: Job, config: JobConfig) -> None:
    try:
        parameters = inspect.signature(job.model)
    except ValueError:  # written in C
        return
    try:
        parameters.bind(**config.model)
    except TypeError as error:
        known = list(parameters.parameters)
        close = "".join(suggestion(option, known) for option in config.model if option not in known)
        raise ConfigError(
            f"model options must suit the job's model, which takes {', '.join(known) or 'none'}; got {config.model} "
            f"({error}).{close}"
        ) from None


def _check_stages(job: Job, config: JobConfig) -> None:
    """Raise ConfigError if the model has too few layers, or the schedule refuses the number of stages."""
    settings = config.parallel
    create_schedule(settings.schedule, settings.stages, settings.micro_batches * config.accumulation, settings.chunks)
    cut_of(outline(lambda: job.model(**config.model)), settings.stages * settings.chunks, settings.sizes)


def _choose(
    job_path: Path, config: JobConfig, ranks: int, output: Path | None, resume: bool, until_the_end: ExitStack
) -> Path:
    """Make or find the run's folder, and lock it until the end."""
    if output is None and resume:
        raise ConfigError("--output must be given with --resume; got none. It names the run to go on with.")
    with making(output or Path(config.output)):
        if output is None:
            folder = _new_folder(Path(config.output), f"{job_path.stem}-{label(config.strategy.name)}-{ranks}")
            until_the_end.callback(_remove_unused, folder)
        else:
            (folder := output).mkdir(parents=True, exist_ok=True)
        until_the_end.enter_context(locked(folder, ENDING_S if resume else 0.0))
    if not resume and any(folder.glob("records-rank*.jsonl")):
        raise ConfigError(
            f"--output must be a folder without records; got {folder}, which holds a run. Add --resume to go on with "
            "it, or give another folder."
        )
    return folder


def _new_folder(parent: Path, name: str) -> Path:
    """Make `parent`/`name`-N, of a number above those of all runs of the name, also of runs that were removed since."""
    parent.mkdir(parents=True, exist_ok=True)
    number = max([0, *_numbers(parent, name), *_numbers(parent / NUMBERS, name)])
    while True:
        number += 1
        with suppress(FileExistsError):  # perhaps of another job that starts at this moment
            (folder := parent / f"{name}-{number}").mkdir()
            return folder


def _keep_number(folder: Path) -> None:
    """Keep the number of a run that has begun: an empty file of its name stays where its folder is removed."""
    name, number = folder.name.rsplit("-", 1)
    kept = folder.parent / NUMBERS
    with suppress(OSError):  # as where the disk is full: then the folder alone tells the number
        kept.mkdir(exist_ok=True)
        (kept / folder.name).touch()
        for lower in _numbers(kept, name):
            if lower < int(number):
                (kept / f"{name}-{lower}").unlink(missing_ok=True)


def _numbers(folder: Path, name: str) -> list[int]:
    """List the numbers of the runs of this name in a folder."""
    found = [path.name.removeprefix(f"{name}-") for path in folder.glob(f"{glob.escape(name)}-*")]
    return [int(text) for text in found if text.isdecimal()]


def _remove_unused(folder: Path) -> None:
    """Remove a new folder if no run has begun in it, as with a setting that the strategy refuses."""
    if not (folder / "run.json").exists():
        shutil.rmtree(folder, ignore_errors=True)


def _with_saved_cut(comm: Communicator, config: JobConfig, checkpoints: Path) -> JobConfig:
    """Collective. Return the settings with the cut of the newest checkpoint, if that has as many stages."""
    sizes = comm.gather(comm.raise_on_all_ranks(lambda: saved_cut(checkpoints) if comm.rank == 0 else None))[0]
    stages = config.parallel.stages * config.parallel.chunks
    return config.with_cut(tuple(sizes)) if sizes and len(sizes) == stages else config


def _newest(trainer: Trainer, allow_changes: bool) -> tuple[tuple[Path, checkpoint.Manifest] | None, Changes]:
    """Collective. Find the newest checkpoint that all ranks can read, and what has changed since, also their number.

    Raises ConfigError where settings have changed, and may not.
    """
    comm, checkpoints = trainer.comm, trainer.checkpoints
    comm.raise_on_all_ranks(
        lambda: clean(checkpoints) if comm.rank == 0 else None
    )  # its lock is held: nobody else saves there
    found = checkpoint.latest_on_all_ranks(comm, checkpoints)
    if found is None:
        if comm.rank == 0:
            _logger.info(f"no checkpoint in {checkpoints} yet: starting anew")
        return None, {}
    path, manifest = found
    changed = changes_since(manifest.meta, trainer)
    if changed and not allow_changes:
        raise ConfigError(
            f"settings must be those of {path} to go on from it; got {describe_changes(changed)}. Add --allow-changes "
            "to go on with the new values, or start another run."
        )
    if comm.rank == 0:
        _logger.info(f"going on from {path}")
    if manifest.ranks != comm.size:
        changed["ranks"] = (manifest.ranks, comm.size)
    return found, changed


# --- provenance -------------------------------------------------------------------------------------------------------
def write_down(
    trainer: Trainer,
    job_path: Path,
    command: Sequence[str],
    resumed_from: tuple[Path, checkpoint.Manifest] | None,
    changed: Changes,
) -> None:
    """Collective. Add this start to the folder's `run.json`, on the first rank, and copy the job's file there."""
    start = describe_start(
        trainer.comm,
        trainer.output,
        job_path,
        all_settings(trainer),
        command=list(command),
        samples=trainer.log.n_samples,
        labels=trainer.labels,
        rate_factor=trainer.rate_factor,
        went_on_from=None if resumed_from is None else str(resumed_from[0]),
        step=0 if resumed_from is None else resumed_from[1].step,
        changed={key: list(values) for key, values in changed.items()},
    )
    if start is not None:
        start_run(trainer.output, start)
