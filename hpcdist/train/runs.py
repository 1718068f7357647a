"""From a job file, settings and flags to a finished run in a folder."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hpcdist import checkpoint, strategies
from hpcdist.comm.communicator import Communicator
from hpcdist.config import JobConfig, load
from hpcdist.errors import ConfigError, HpcdistError
from hpcdist.records import Summary
from hpcdist.train.job import Job, load_job
from hpcdist.train.loop import Progress, Trainer

T = TypeVar("T")


def train(
    comm: Communicator,
    job_path: Path,
    toml_path: Path | None = None,
    overrides: Sequence[str] = (),
    output: Path | None = None,
    resume: bool = False,
    show: Callable[[str, Progress], None] | None = None,
    say: Callable[[str], None] | None = None,
    ends_at: float | None = None,
) -> tuple[Path, Summary | None]:
    """Collective. Runs a job to its end; its folder and its summary, the same on all ranks.

    Without a summary the run has left early, on a signal or before `ends_at`, and a checkpoint has been saved.

    Args:
        toml_path, overrides: settings over the job's defaults.
        output: the run's folder; None makes a new one under the configured one.
        resume: go on from the newest whole checkpoint in `output`; start anew where there is none yet.
        show: called with the strategy's name and the progress, on rank 0, or the first rank that lives.
        say: called on rank 0 with what the user should know about resuming, and about leaving.
        ends_at: when the job is ended from outside, in seconds since 1970; None where it is not, or not known.

    Raises:
        ConfigError: a setting breaks its rule, or the folder holds another run.
    """
    job, config = together(comm, lambda: specify(job_path, toml_path, overrides))
    folder = _decided(comm, lambda: _choose(job_path, config, output, resume))
    report = None if show is None else lambda progress: show(config.strategy.name, progress)
    trainer = Trainer(job, config, comm, folder, report, ends_at=ends_at, listens=True)
    summary = trainer.run(_decided(comm, lambda: _newest(trainer.checkpoints, say)) if resume else None)
    if summary is None and say is not None and comm.rank == comm.living[0]:
        step = trainer.position.step
        say(f"left after step {step} ({trainer.leaving.reason}), saved in {trainer.checkpoints}: go on with --resume")
    trainer.close()
    return folder, summary


def together(comm: Communicator, work: Callable[[], T]) -> T:
    """Collective. `work()` on every rank; where it fails with an error of hpcdist's on one, it raises on all.

    So a setting that only one rank finds wrong (its file is missing, say) leaves nobody waiting.
    """
    result, failure = None, None
    try:
        result = work()
    except HpcdistError as error:
        failure = error
    told = comm.exchange(b"" if failure is None else str(failure).encode())
    if failure is not None:
        raise failure
    for rank, text in enumerate(told):
        if text:
            raise ConfigError(f"on rank {rank}: {text.decode()}")
    return result


def _decided(comm: Communicator, work: Callable[[], Path | None]) -> Path | None:
    """Collective. What `work()` finds on rank 0, on every rank: other nodes may see a shared folder later."""
    found = together(comm, lambda: work() if comm.rank == 0 else None)
    text = comm.exchange(str(found or "").encode())[0].decode()
    return Path(text) if text else None


def specify(job_path: Path, toml_path: Path | None, overrides: Sequence[str]) -> tuple[Job, JobConfig]:
    job = load_job(job_path)
    values = load({"data": {"path": f"data/{job_path.stem}.h5"}, **job.defaults}, toml_path, overrides)
    config = JobConfig(**values)
    strategies.load(config.strategy.name).Config.from_mapping(config.strategy.options, "strategy")  # before any folder
    return job, config


def _choose(job_path: Path, config: JobConfig, output: Path | None, resume: bool) -> Path:
    """The run's folder, made."""
    if output is None and resume:
        raise ConfigError("--output must be given with --resume; got none. It names the run to go on with.")
    if output is not None and not resume and any(output.glob("records-rank*.jsonl")):
        raise ConfigError(
            f"--output must be a folder without records; got {output}, which holds a run. Add --resume to go on with "
            "it, or give another folder."
        )
    try:
        if output is None:
            return _new_folder(Path(config.output), f"{job_path.stem}-{config.strategy.name}")
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--output must be a folder that can be made; got {error.filename} ({error.strerror}). Give another one."
        ) from None
    return output


def _new_folder(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        try:
            (folder := parent / f"{name}-{number}").mkdir()
        except FileExistsError:  # another job may be making its own at this moment
            continue
        return folder


def _newest(checkpoints: Path, say: Callable[[str], None] | None) -> Path | None:
    found = checkpoint.latest(checkpoints, fallback=True)
    if say is not None:
        say(f"going on from {found}" if found else f"no checkpoint in {checkpoints} yet: starting anew")
    return found
