"""Define a job: the model, its data, its measure. The rest is configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hpcdist.config.files import load_file
from hpcdist.errors import ConfigError


@dataclass(frozen=True)
class Metric:
    """A measure of a model over a data set: `finish` of the mean of `per_sample` values.

    Args:
        per_sample: (outputs, targets) -> one value per sample, shape (batch,).
        finish: applied to the mean over the data set, e.g. a square root.
        higher_is_better: False for an error.
    """

    per_sample: Callable[[Tensor, Tensor], Tensor]
    finish: Callable[[float], float] = float
    higher_is_better: bool = True


@dataclass(frozen=True)
class Job:
    """A training job; a file in `jobs/` has one under the name `job`.

    Args:
        model: makes the model from the options under `model` in the configuration; seeded alike on every rank.
        loss: (outputs, targets) -> the mean loss over a batch, a scalar to differentiate.
        metrics: by name; the first one is the job's own measure.
        data: writes the HDF5 file with splits `train` and `test` if it isn't there yet; called on rank 0 only.
        defaults: configuration that the user's TOML file and `--set` override.
    """

    model: Callable[..., nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    metrics: Mapping[str, Metric]
    data: Callable[[Path], None]
    defaults: Mapping[str, Any] = field(default_factory=dict)


def load_job(path: str | Path) -> Job:
    """Load the job that a file defines; the file may import files beside it, while it is loaded.

    Raises:
        ConfigError: there is no such file, or it defines no `job`.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"job must be a Python file; got {path}, which does not exist. See jobs/ for examples.")
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
