"""A job: a model, its data and its metrics. Everything else is configuration."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

from hpcdist.comm.communicator import Communicator
from hpcdist.config.files import binds, load_file
from hpcdist.config.job import JobConfig
from hpcdist.data import HDF5Dataset  # first: it raises a clear error without h5py
from hpcdist.data.hdf5 import COLUMNS
from hpcdist.data.labels import counts, dirichlet, labels_of
from hpcdist.data.loader import Loader
from hpcdist.errors import NO_SPACE, ConfigError, DataError, OutputError, suggestion
from hpcdist.records import writing
from hpcdist.session.world import require_equal
from hpcdist.train.datasets import JobDataset

JobData = HDF5Dataset | JobDataset


@dataclass(frozen=True)
class Metric:
    """A metric of a model over a data set: `finish` of the mean of `per_sample` values.

    Example:
        >>> from hpcdist.train import Metric, squared_error
        >>> rmse = Metric(squared_error, finish=lambda mean: mean**0.5, higher_is_better=False)

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
    """A training job: a file in `jobs/` defines one as `job`.

    Example:
        >>> from hpcdist.train import Job, Metric, accuracy
        >>> create = lambda width=64: nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
        >>> metrics = {"accuracy": Metric(accuracy)}
        >>> job = Job(create, nn.functional.cross_entropy, metrics, data={"train": data, "test": data})

    Args:
        model: creates the model from the options under `model` in the configuration; every rank has the same seed.
        loss: (outputs, targets) -> the mean loss over a batch, a scalar to differentiate.
        metrics: by name; the first one is the job's main metric.
        data: torch Datasets of pairs (x, y) by the names `train` and `test`; or a function (path) that writes an HDF5
            file, which rank 0 calls if that file is missing. `data.path` sets another file; a job that always reads a
            file needs no data here.
        defaults: settings, overridden by the user's TOML file and `--set`.
        collate_fn: joins a list of samples of the Datasets into a batch, a pair of tensors (x, y), as in DataLoader.
    """

    model: Callable[..., nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    metrics: Mapping[str, Metric]
    data: Callable[[Path], object] | Mapping[str, Dataset[Any]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    collate_fn: Callable[[list[Any]], tuple[Tensor, Tensor]] | None = None


def load_job(path: str | Path) -> Job:
    """Return the `job` that a file defines; the file may import files in its folder."""
    path = Path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"job must be a Python file; got {path}, which {what}. See jobs/ for examples.")
    text = path.read_text(encoding="utf-8", errors="replace")
    if re.search(r"\b(hd|hpcdist)\.init\(", text) and not binds(text, "job"):  # it would train while it is imported
        raise ConfigError(
            f"job must be a file that defines `job`; got {path}, a script with its own training loop. Run it by "
            f"`hpcdist run -n 2 {path}`; `hpcdist compare`, `simulate` and `sweep` take scripts, too."
        )
    job = getattr(load_file(path), "job", None)
    if not isinstance(job, Job):
        raise ConfigError(f"job file must define `job = hpcdist.train.Job(...)`; got {path}, which does not.")
    return job


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1 for each sample whose largest output is its class, else 0.

    Example:
        >>> from hpcdist.train import accuracy
        >>> accuracy(torch.tensor([[0.2, 0.8], [0.9, 0.1]]), torch.tensor([1, 1]))
        tensor([1., 0.], dtype=torch.float64)

    Args:
        outputs: shape (batch, classes).
        targets: classes, shape (batch,).
    """
    return (outputs.argmax(dim=1) == targets).double()


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the squared difference of each sample, averaged over its outputs; shape (batch,).

    Example:
        >>> from hpcdist.train import squared_error
        >>> squared_error(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0]]))
        tensor([2.], dtype=torch.float64)
    """
    return (outputs.reshape(targets.shape) - targets).double().square().reshape(len(targets), -1).mean(dim=1)


def split_samples(
    config: JobConfig, data: JobData, workers: int
) -> tuple[tuple[np.ndarray, ...], list[dict[str, int]] | None]:
    """Return each worker's samples, and their number by label; empty if any worker may get any sample."""
    if config.data.split == "any":
        return (), None
    labels = labels_of(data)
    parts = dirichlet(labels, workers, config.data.alpha, config.seed)
    return parts, counts(labels, parts)


def open_data(
    job: Job, config: JobConfig, comm: Communicator, columns: Collection[str] = COLUMNS
) -> tuple[JobData, JobData]:
    """Collective. Open a job's data for training and for testing; rank 0 creates a missing file.

    Args:
        columns: x, y or both: what this rank reads of a file.

    Raises:
        MismatchError: a rank has other samples, for example because a node has an old copy of the file.
    """
    if comm.rank == 0:
        prepare_data(job, config)
    comm.barrier()
    mpi = comm.mpi if config.data.parallel else None
    train, test = (open_split(job, config, split, mpi_comm=mpi, columns=columns) for split in ("train", "test"))
    require_equal(comm, describe_data(train, test), "the data's content")
    return train, test


def first_batch(job: Job, config: JobConfig, samples: int) -> tuple[Tensor, Tensor]:
    """Read a batch of `samples` training samples, or all if there are fewer; create the data file if it is missing."""
    prepare_data(job, config)
    with closing(open_split(job, config, "train")) as data:
        return next(iter(Loader(data, min(samples, len(data)))))


def open_split(job: Job, config: JobConfig, split: str, **options: Any) -> JobData:
    """Open a job's data, "train" or "test": the file, with options of HDF5Dataset, or the job's Dataset."""
    if config.data.path is None and isinstance(job.data, Mapping):
        if set(job.data) != {"train", "test"}:
            names = ", ".join(map(repr, job.data)) or "none"
            raise DataError(f"data must be Datasets by the names train and test, or data.path a file; got {names}.")
        return JobDataset(split, job.data[split], config.seed, job.collate_fn, config.data.num_workers)
    return HDF5Dataset(Path(str(config.data.path)), split, **options)


def describe_data(train: JobData, test: JobData) -> dict[str, Any]:
    """Return source and checksums of a job's data, without paths; a part of a run's settings, under `data`."""
    return {"source": train.source, "checksums": {"train": train.checksum, "test": test.checksum}}


def check_path(job: Job, config: JobConfig) -> None:
    """Raise ConfigError if a data file is missing that the job does not create (it creates that of its defaults)."""
    path, creates = Path(config.data.path or ""), not isinstance(job.data, Mapping)
    default = Path(job.defaults.get("data", {}).get("path") or path)
    if path.exists() or (creates and path.name == default.name):  # in any folder
        return
    stems = [*([default.stem] if creates else []), *(file.stem for file in path.parent.glob("*.h5"))]
    raise ConfigError(
        f"data.path must be a file that exists{f', or {default}, which the job creates' if creates else ''}; got "
        f"{path}, which does not exist.{suggestion(path.stem, stems)} `hpcdist data import` creates such files from "
        "other formats."
    )


def _write_by(write: Callable[[Path], object], path: Path) -> None:
    """Let a job's function write its data; raise ConfigError if it takes no path, or writes no file there."""
    try:
        inspect.signature(write).bind(path)
    except TypeError as error:
        raise ConfigError(
            f"data of the job must be a function of the path of the file to write; got another ({error}). Give it "
            "one argument, or pass torch Datasets by the names train and test. The path of a file that exists is a "
            "setting: defaults={'data': {'path': 'digits.h5'}}, without data."
        ) from None
    except ValueError:  # written in C
        pass
    write(path)
    if not path.exists():
        raise ConfigError(
            f"data of the job must write the file at its argument, as hpcdist.data.create does; got none at {path}. "
            "To return data sets, pass them: data={'train': ..., 'test': ...}."
        )


def prepare_data(job: Job, config: JobConfig) -> None:
    """Create the job's data file if it is missing.

    Raises:
        ConfigError: the job does not create the missing file; its name may be misspelt.
    """
    check_path(job, config)
    if config.data.path is not None:
        create_data(job, Path(config.data.path))


def create_data(job: Job, path: Path) -> None:
    """Let the job's function write a missing data file; remove an incomplete one."""
    if path.exists() or isinstance(job.data, Mapping):
        return
    try:
        with writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        _write_by(job.data, path)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise OutputError.of(path, error) from error
        raise
