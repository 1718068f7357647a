"""Run a job in a folder to its end, from a job file, settings and flags; write its provenance."""

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
from typing import Any

from hpcdist import checkpoint, strategies
from hpcdist.checkpoint.folder import clean
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.traced import end_timeline, start_timeline
from hpcdist.config.files import neighbours, not_ending
from hpcdist.config.job import JobConfig
from hpcdist.config.merge import Changes, describe_changes, load
from hpcdist.config.optimizer import with_functions_of
from hpcdist.errors import ConfigError, suggestion
from hpcdist.parallel.cut import cut_of
from hpcdist.parallel.layers import outline
from hpcdist.parallel.schedules import create as create_schedule
from hpcdist.records import Outcome, Summary, end_run, locked, making, merged_timeline, start_run
from hpcdist.records.timeline import unused
from hpcdist.registry import label
from hpcdist.session import loggers
from hpcdist.session.run import ENDING_S, describe_start, on_rank_0, outcome_of
from hpcdist.session.world import require_same_files
from hpcdist.train.interruption import Interruption
from hpcdist.train.job import Job, load_job
from hpcdist.train.log import Progress
from hpcdist.train.loop import Trainer
from hpcdist.train.resume import all_settings, changes_since, saved_cut
from hpcdist.train.stop_conditions import EarlyStopping

NUMBERS = ".numbers"  # in the folder of runs: a file named as the last run of each job, strategy and number of ranks
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
    """Collective. Run a job to its end; return the run's folder and summary on every rank.

    The summary is None if the run has left early, on a signal or before `ends_at`, with a checkpoint.

    Args:
        toml_path, overrides: settings that override the job's defaults.
        output: the run's folder; None: a new one in the configured folder.
        resume: continue from the newest complete checkpoint in `output`, or start from the beginning if there is none.
        show: called with the strategy's name and the progress, on the first surviving rank.
        ends_at: end of the job, in seconds since 1970; None if unlimited or unknown.
        command, environment: the command line, stored in the run's folder, and this process's environment; the command
            to resume the run is derived from both.
        make: creates the trainer, from the arguments of Trainer.
        timeline: write `timeline.json`, or `timeline-2.json`... if the run is resumed.
        allow_changes: resume also if settings differ from those of the checkpoint.
        judge: called with the run's folder, on the first surviving rank, after each evaluation but the last; returns a
            reason to end the run (the summary's `stopped_early`), or None.

    Raises:
        ConfigError: a setting breaks its rule, the folder holds another run, or another process works in it; a resumed
            run has other settings or data than its checkpoint; the job's code calls sys.exit.
        MismatchError: ranks have other files of the job, other data, or other settings.
    """
    if allow_changes and not resume:
        raise ConfigError("--resume must be given with --allow-changes; got none. It continues an existing run.")
    with _not_exiting(job_path), ExitStack() as until_the_end:
        until_the_end.enter_context(neighbours(job_path))  # the job's functions may import them later
        job, config = comm.raise_on_all_ranks(lambda: specify(job_path, toml_path, overrides))
        require_same_files(comm)
        folder = Path(
            on_rank_0(comm, lambda: str(_open_folder(job_path, config, comm.size, output, resume, until_the_end)))
        )
        if timeline:
            path = on_rank_0(comm, lambda: str(unused(folder / merged_timeline.FILE_NAME)))
            comm = start_timeline(comm, Path(path))
        report = None if show is None else lambda progress: show(config.strategy.name, progress)
        if resume and config.parallel.measures:
            config = _with_saved_cut(comm, config, Path(config.checkpoint.folder or folder / "checkpoints"))
        judged, listens = None if judge is None else partial(judge, folder), comm.platform.virtual is None
        trainer = make(job, config, comm, folder, report, ends_at=ends_at, listens=listens, judge=judged)
        newest, changed = _newest(trainer, allow_changes) if resume else (None, {})
        write_start(trainer, job_path, command, newest, changed)
        leads = comm.rank == comm.failures.alive[0]
        if leads and output is None:
            _keep_number(folder)
        pids = getattr(comm, "pids", None)
        processes = {rank: pids[rank] for rank in comm.memory.local_ranks} if pids else {}
        interruption = Interruption(folder, trainer.checkpoints, command, environment, comm.size, processes)
        if trainer.leaving is not None and leads:
            trainer.leaving.on_signal = interruption.report_signal
        try:
            summary = trainer.run(newest and newest[0])
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            with suppress(OSError):
                _end(comm, folder, *outcome_of(error))
                if comm.trace.timeline is not None:
                    comm.trace.timeline.close()
            raise
        reason = None if trainer.leaving is None else trainer.leaving.reason
        _end(comm, folder, "interrupted" if summary is None else "ended", reason)
        if comm.trace.timeline is not None:
            end_timeline(comm)
        if summary is None and leads:
            interruption.report_left(trainer.position.step, str(reason))
        trainer.close()
    return folder, summary


def _not_exiting(job_path: Path) -> AbstractContextManager[None]:
    advice = "Raise an exception to fail. A run ends early by stop.patience, epochs or budget."
    return not_ending(job_path, "while its run is active", advice)


def _end(comm: Communicator, folder: Path, outcome: Outcome, reason: str | None) -> None:
    if comm.rank == comm.failures.alive[0]:
        end_run(folder, outcome, reason)


def specify(job_path: Path, toml_path: Path | None, overrides: Sequence[str]) -> tuple[Job, JobConfig]:
    """Load a job and its settings; run the checks that need only one process."""
    job = load_job(job_path)
    options = load({}, toml_path, overrides)  # what the user sets
    if not isinstance(job.data, Mapping):
        data = {"path": f"data/{job_path.stem}.h5", **job.defaults.get("data", {})}
        job = replace(job, defaults={**job.defaults, "data": data})
    defaults = dict(job.defaults)
    budget = options.get("budget")
    if "epochs" not in options and isinstance(budget, Mapping) and any(limit != "none" for limit in budget.values()):
        defaults.pop("epochs", None)  # a budget replaces the job's default number of epochs
    values = load(defaults, toml_path, overrides)
    if "schedule" in values:
        values["schedule"] = with_functions_of(job_path, values["schedule"])
    config = JobConfig(**values)
    strategies.load(config.strategy.name).Config.from_mapping(config.strategy.options, "strategy")  # before any folder
    loggers.require(config.log)
    EarlyStopping(job, config)
    if config.data.prefetch and config.data.path is None:
        raise ConfigError(
            f"data.prefetch must be 0 with torch Datasets, because a thread would use the model's random numbers; got "
            f"{config.data.prefetch}. Set data.num_workers, a number of processes."
        )
    _check_model(job, config)
    if not config.parallel.whole:
        with _not_exiting(job_path):  # creates the model's layers
            _check_stages(job, config)
    return job, config


def _check_model(job: Job, config: JobConfig) -> None:
    """Raise ConfigError if the job's model does not take the configured options."""
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


def _open_folder(
    job_path: Path, config: JobConfig, ranks: int, output: Path | None, resume: bool, until_the_end: ExitStack
) -> Path:
    """Create or find the run's folder, and lock it until `until_the_end` is closed."""
    if output is None and resume:
        raise ConfigError("--output must be given with --resume; got none. It names the run to resume.")
    folder = output
    if folder is None:
        with making(Path(config.output)):
            folder = _new_folder(Path(config.output), f"{job_path.stem}-{label(config.strategy.name)}-{ranks}")
        until_the_end.callback(_remove_unused, folder)
    until_the_end.enter_context(locked(folder, ENDING_S if resume else 0.0))
    if not resume and any(folder.glob("records-rank*.jsonl")):
        raise ConfigError(
            f"--output must be a folder without records; got {folder}, which holds a run. Add --resume to continue it, "
            "or set another folder."
        )
    return folder


def _new_folder(parent: Path, name: str) -> Path:
    """Create `parent`/`name`-N, with N above the numbers of all runs with that name, including removed ones."""
    parent.mkdir(parents=True, exist_ok=True)
    number = max([0, *_numbers(parent, name), *_numbers(parent / NUMBERS, name)])
    while True:
        number += 1
        with suppress(FileExistsError):  # another job may be starting at the same time
            (folder := parent / f"{name}-{number}").mkdir()
            return folder


def _keep_number(folder: Path) -> None:
    """Store the number of a started run, as an empty file with its name, which stays when its folder is removed."""
    name, number = folder.name.rsplit("-", 1)
    numbers_folder = folder.parent / NUMBERS
    with suppress(OSError):  # for example if the disk is full
        numbers_folder.mkdir(exist_ok=True)
        (numbers_folder / folder.name).touch()
        for lower in _numbers(numbers_folder, name):
            if lower < int(number):
                (numbers_folder / f"{name}-{lower}").unlink(missing_ok=True)


def _numbers(folder: Path, name: str) -> list[int]:
    """Return the numbers of the runs with this name in a folder."""
    suffixes = [path.name.removeprefix(f"{name}-") for path in folder.glob(f"{glob.escape(name)}-*")]
    return [int(text) for text in suffixes if text.isdecimal()]


def _remove_unused(folder: Path) -> None:
    """Remove a new folder if no run has started in it, for example after an invalid setting."""
    if not (folder / "run.json").exists():
        shutil.rmtree(folder, ignore_errors=True)


def _with_saved_cut(comm: Communicator, config: JobConfig, checkpoints: Path) -> JobConfig:
    """Collective. Return the settings with the cut of the newest checkpoint, if it has the same number of stages."""
    sizes = on_rank_0(comm, lambda: saved_cut(checkpoints))
    stages = config.parallel.stages * config.parallel.chunks
    return config.with_cut(tuple(sizes)) if sizes and len(sizes) == stages else config


def _newest(trainer: Trainer, allow_changes: bool) -> tuple[tuple[Path, checkpoint.Manifest] | None, Changes]:
    """Collective. Return the newest checkpoint that all ranks can read, and changed settings, also the number of ranks.

    Raises ConfigError if settings have changed, and `allow_changes` is False.
    """
    comm, checkpoints = trainer.comm, trainer.checkpoints
    # The run's lock is held: no other process saves there.
    comm.raise_on_all_ranks(lambda: clean(checkpoints) if comm.rank == 0 else None)
    newest = checkpoint.latest_on_all_ranks(comm, checkpoints)
    if newest is None:
        if comm.rank == 0:
            _logger.info(f"no checkpoint in {checkpoints} yet: starting from the beginning")
        return None, {}
    path, manifest = newest
    changed = changes_since(manifest.meta, trainer)
    if changed and not allow_changes:
        raise ConfigError(
            f"settings must be those of {path} to resume from it; got {describe_changes(changed)}. Add --allow-changes "
            "to continue with the new values, or start another run."
        )
    if comm.rank == 0:
        _logger.info(f"resuming from {path}")
    if manifest.ranks != comm.size:
        changed["ranks"] = (manifest.ranks, comm.size)
    return newest, changed


# --- provenance -------------------------------------------------------------------------------------------------------
def write_start(
    trainer: Trainer, job_path: Path, command: Sequence[str], resumed_from: tuple[Path, checkpoint.Manifest] | None,
    changed: Changes,
) -> None:  # fmt: skip
    """Collective. Add this start to the folder's `run.json`, on the first rank, and copy the job's file there."""
    start = describe_start(
        trainer.comm, trainer.output, job_path, all_settings(trainer), command=list(command),
        samples=trainer.log.n_samples, labels=trainer.labels, rate_factor=trainer.rate_factor,
        went_on_from=None if resumed_from is None else str(resumed_from[0]),
        step=0 if resumed_from is None else resumed_from[1].step,
        changed={key: list(values) for key, values in changed.items()},
    )  # fmt: skip
    if start is not None:
        start_run(trainer.output, start)
