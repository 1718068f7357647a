"""A job: the model, its data, its measure. Everything else is configuration."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

from hpcdist.comm.communicator import Communicator
from hpcdist.config import JobConfig
from hpcdist.config.files import load_file
from hpcdist.data import HDF5Dataset  # first: it names what is missing where h5py is
from hpcdist.data.datasets import write_datasets
from hpcdist.data.hdf5 import COLUMNS
from hpcdist.data.labels import counts, dirichlet, labels_of
from hpcdist.errors import NO_SPACE, ConfigError, OutputError, suggestion
from hpcdist.records import writing
from hpcdist.session.world import require_equal

NEAR = 0.8  # difflib's ratio of two names of files, from which one is a slip


@dataclass(frozen=True)
class Metric:
    """A measure of a model over a data set: `finish` of the mean of `per_sample` values.

    Args:
        per_sample: (outputs, targets) -> one value per sample, shape (batch,).
        finish: applied to the mean over the data set, such as a square root.
        higher_is_better: False for an error.
    """

    per_sample: Callable[[Tensor, Tensor], Tensor]
    finish: Callable[[float], float] = float
    higher_is_better: bool = True


@dataclass(frozen=True)
class Job:
    """A training job; a file in `jobs/` has one under the name `job`.

    Args:
        model: makes the model from the options under `model` in the configuration; every rank has the same seed.
        loss: (outputs, targets) -> the mean loss over a batch, a scalar to differentiate.
        metrics: by name; the first one is the job's own measure.
        data: torch Datasets of pairs (x, y) under `train` and `test`, which are written to the HDF5 file; or a function
            that writes that file at a path. Either only on rank 0, if there is no file.
        defaults: configuration that the user's TOML file and `--set` override.
    """

    model: Callable[..., nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    metrics: Mapping[str, Metric]
    data: Callable[[Path], object] | Mapping[str, Dataset[Any]]
    defaults: Mapping[str, Any] = field(default_factory=dict)


def load_job(path: str | Path) -> Job:
    """Load the `job` that a file defines; the file may import files beside it."""
    path = Path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"job must be a Python file; got {path}, which {what}. See jobs/ for examples.")
    job = getattr(load_file(path), "job", None)
    if not isinstance(job, Job):
        raise ConfigError(f"job file must define `job = hpcdist.train.Job(...)`; got {path}, which does not.")
    return job


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1 for each sample whose largest output is its class, else 0. Shapes (batch, classes) and (batch,)."""
    return (outputs.argmax(dim=1) == targets).double()


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the squared difference of each sample, averaged over its outputs; shape (batch,)."""
    return (outputs.reshape(targets.shape) - targets).double().square().reshape(len(targets), -1).mean(dim=1)


def own_samples(
    config: JobConfig, data: HDF5Dataset, workers: int
) -> tuple[tuple[np.ndarray, ...], list[dict[str, int]] | None]:
    """Return the samples of each worker, and their number by label; nothing where workers have none of their own."""
    if config.data.split == "any":
        return (), None
    labels = labels_of(data)
    parts = dirichlet(labels, workers, config.data.alpha, config.seed)
    return parts, counts(labels, parts)


def open_data(
    job: Job, config: JobConfig, comm: Communicator, columns: Collection[str] = COLUMNS
) -> tuple[HDF5Dataset, HDF5Dataset]:
    """Collective. Open the splits `train` and `test` of a job's data file; rank 0 makes a missing file.

    Args:
        columns: x, y or both, as this rank reads them.

    Raises:
        MismatchError: some rank's file has other samples, as where a node has an old copy.
    """
    path = Path(str(config.data.path))
    if comm.rank == 0:
        make_data(job, path)
    comm.barrier()
    given: dict[str, Any] = {"mpi_comm": comm.mpi if config.data.parallel else None, "columns": columns}
    train, test = HDF5Dataset(path, "train", **given), HDF5Dataset(path, "test", **given)
    require_equal(comm, described(train, test), "the data file's content")
    return train, test


def described(train: HDF5Dataset, test: HDF5Dataset) -> dict[str, Any]:
    """Return what tells a job's data from others, wherever their file lies; among a run's settings, under `data`."""
    return {"source": train.source, "checksums": {"train": train.checksum, "test": test.checksum}}


def _without_digits(name: str) -> str:
    return re.sub(r"\d", "", name)


def check_path(job: Job, path: Path) -> None:
    """Raise ConfigError where a data file is missing, and its name is nearly that of another, or of the job's own."""
    if path.exists():
        return
    own = Path(str(job.defaults.get("data", {}).get("path") or ""))
    there = [own.stem, *(file.stem for file in path.parent.glob("*.h5"))]
    # Names that differ in digits alone are meant so, such as cifar10 and cifar100.
    close = suggestion(path.stem, [stem for stem in there if _without_digits(stem) != _without_digits(path.stem)], NEAR)
    if close and path.name != own.name:
        raise ConfigError(
            f"data.path must be the name of a file that exists, or a new name; got {path}, which is neither.{close} "
            "If it is to be made, take a name that is less alike."
        )


def _write_by(write: Callable[[Path], object], path: Path) -> None:
    """Let a job's function write its data.

    Raises:
        ConfigError: it takes no path, or has written no file there.
    """
    try:
        inspect.signature(write).bind(path)
    except TypeError as error:
        raise ConfigError(
            f"data of the job must be a function of the path of the file to write; got one that takes others ({error})."
            " Give it one argument, or pass torch Datasets by the names train and test."
        ) from None
    except ValueError:  # written in C
        pass
    write(path)
    if not path.exists():
        raise ConfigError(
            f"data of the job must write the file that it is given, as hpcdist.data.create does; got none at {path}. "
            "To return data sets, pass them: data={'train': ..., 'test': ...}."
        )


def make_data(job: Job, path: Path) -> None:
    """Make a missing data file, unless `check_path` refuses its name; remove a file that is not whole."""
    check_path(job, path)
    if path.exists():
        return
    try:
        with writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(job.data, Mapping):
            write_datasets(path, job.data)
        else:
            _write_by(job.data, path)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise OutputError.of(path, error) from error
        raise
