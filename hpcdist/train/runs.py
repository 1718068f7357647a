"""From a job file, settings and flags to a finished run in a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hpcdist import checkpoint
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
) -> Summary:
    """Collective. Runs a job to its end; the run's summary, the same on all ranks.

    Args:
        toml_path, overrides: settings over the job's defaults.
        output: the run's folder; None makes a new one under the configured one.
        resume: go on from the newest whole checkpoint in `output`; start anew where there is none yet.
        show: called on rank 0 with the strategy's name and the progress.

    Raises:
        ConfigError: a setting breaks its rule, or the folder holds another run.
    """
    job, config = together(comm, lambda: _specify(job_path, toml_path, overrides))
    chosen = together(comm, lambda: _choose(job_path, config, output, resume) if comm.rank == 0 else "")
    folder = Path(comm.exchange(chosen.encode())[0].decode())
    trainer = Trainer(job, config, comm, folder, None if show is None else lambda p: show(config.strategy.name, p))
    summary = trainer.run(checkpoint.latest(trainer.checkpoints, fallback=True) if resume else None)
    trainer.close()
    return summary


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


def _specify(job_path: Path, toml_path: Path | None, overrides: Sequence[str]) -> tuple[Job, JobConfig]:
    job = load_job(job_path)
    values = load({"data": {"path": f"data/{job_path.stem}.h5"}, **job.defaults}, toml_path, overrides)
    return job, JobConfig(**values)


def _choose(job_path: Path, config: JobConfig, output: Path | None, resume: bool) -> str:
    """The run's folder, made; on rank 0."""
    if output is None:
        if resume:
            raise ConfigError("--output must be given with --resume; got none. It names the run to go on with.")
        output = _new_folder(Path(config.output), f"{job_path.stem}-{config.strategy.name}")
    elif not resume and any(output.glob("records-rank*.jsonl")):
        raise ConfigError(
            f"--output must be a folder without records; got {output}, which holds a run. Add --resume to go on with "
            "it, or give another folder."
        )
    output.mkdir(parents=True, exist_ok=True)
    return str(output)


def _new_folder(parent: Path, name: str) -> Path:
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"
