"""Provenance of a run: its files, its settings with defaults, versions, hosts."""

from __future__ import annotations

import inspect
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import hpcdist
from hpcdist.comm.communicator import Communicator, mpi_of
from hpcdist.config import optimizers, schedules
from hpcdist.config.files import git_commit, imported_beside
from hpcdist.records import Start, begin_run, copy_job, now

if TYPE_CHECKING:
    from hpcdist.train.loop import Trainer


def write_down(trainer: Trainer, job_path: Path, command: Sequence[str], resumed_from: Path | None) -> None:
    """Collective. Add this start to the folder's `run.json`, on the first rank, and copy the job's file there."""
    comm = trainer.comm
    hosts = comm.gather(platform.node())
    if comm.rank != comm.failures.living[0]:
        return
    revision, dirty = git_commit(job_path.resolve().parent)
    start = Start(
        started=now(),
        ended=None,
        command=list(command),
        job=copy_job(trainer.output, job_path, imported_beside(job_path)),
        commit=revision,
        dirty=dirty,
        ranks=comm.size,
        samples=trainer.log.n_samples,
        hosts=hosts,
        versions=versions(comm),
        settings=json.loads(json.dumps(settings(trainer), default=str)),
        rate_factor=trainer.rate_factor,
        virtual=None if comm.trace.virtual is None else json.loads(json.dumps(comm.trace.virtual, default=str)),
        went_on_from=None if resumed_from is None else str(resumed_from),
    )
    begin_run(trainer.output, start)


def versions(comm: Communicator) -> dict[str, str | None]:
    """Return the versions of hpcdist, Python and the libraries beneath; MPI's is None on virtual ranks."""
    libraries = {"hpcdist": hpcdist.__version__, "torch": torch.__version__, "numpy": np.__version__}
    library = None
    if mpi_of(comm) is not None:
        from hpcdist.comm.mpi.library import version

        library = version()
    return {**libraries, "python": platform.python_version(), "mpi": library}


def settings(trainer: Trainer) -> dict[str, Any]:
    """Return every setting of a run, with the defaults of torch, the strategy and the job's model."""
    config = trainer.config
    values = config.model_dump()
    values["data"]["source"] = trainer.data_source
    values["strategy"] = {"name": config.strategy.name, **trainer.strategy_options}
    values["optimizer"] = _resolved(optimizers()[config.optimizer.name], values["optimizer"])
    if config.schedule.name is not None:
        values["schedule"] = _resolved(schedules()[config.schedule.name], values["schedule"])
    values["model"] = _resolved(trainer.job.model, values["model"])
    return values


def _resolved(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Complete values by the function's own defaults; a None stands for the default too."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # written in C
        return given
    own = {p.name: p.default for p in parameters if p.default is not p.empty and p.name != "optimizer"}
    return own | {key: value for key, value in given.items() if value is not None or own.get(key) is None}
