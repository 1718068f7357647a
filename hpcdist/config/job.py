"""What a training job consists of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from hpcdist.config.named import Named
from hpcdist.config.settings import Settings, suggestion
from hpcdist.errors import ConfigError, UnknownNameError

# They are made of functions or of other schedules, which a table can't hold.
_NOT_IN_A_TABLE = {"LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"}


class StrategyConfig(Named):
    """Which strategy, with its options; they are checked by the strategy's own `Config`."""

    name: str = Field("allreduce", description="distribution strategy, see `hpcdist strategies`")


class OptimizerConfig(Named):
    """A class of torch.optim, with its options."""

    name: str = Field("SGD", description="class of torch.optim; its other options are keys beside the name")
    lr: float | None = Field(None, ge=0, description="learning rate; none is torch's default for the optimizer")

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        known = optimizers()
        if self.name not in known:
            raise UnknownNameError("optimizer.name", self.name, known)
        _check_options("optimizer", known[self.name], self.options)
        self.build([torch.zeros(1, 1, requires_grad=True)])
        return self

    def build(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """The optimizer over these parameters.

        Raises:
            ConfigError: torch refuses the options.
        """
        options = self.options if self.lr is None else {"lr": self.lr, **self.options}
        return _call("optimizer", optimizers()[self.name], parameters, options)


class ScheduleConfig(Named):
    """A class of torch.optim.lr_scheduler, with its options."""

    name: str | None = Field(None, description="class of torch.optim.lr_scheduler; its options are keys beside it")
    per: Literal["epoch", "step"] = Field("epoch", description="when the schedule advances")

    @model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        if self.name is None:
            if self.options:
                raise ConfigError(f"schedule.name must be given with the options {', '.join(self.options)}; got none.")
        elif self.name not in (known := schedules()):
            raise UnknownNameError("schedule.name", self.name, known)
        else:
            _check_options("schedule", known[self.name], self.options)
        return self

    def build(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        """The schedule over this optimizer, None without a name.

        Raises:
            ConfigError: torch refuses the options.
        """
        return None if self.name is None else _call("schedule", schedules()[self.name], optimizer, self.options)


class CheckpointConfig(Settings):
    """When and where the run is saved."""

    every_steps: int = Field(0, ge=0, description="steps between checkpoints; 0 saves none")
    keep: int = Field(3, ge=1, description="how many checkpoints stay")
    folder: str | None = Field(None, description="where checkpoints go; none is `checkpoints` in the output folder")


class LeaveConfig(Settings):
    """Leaving early, with a checkpoint, to be started again with --resume."""

    enabled: bool = Field(True, description="leave on SIGTERM, SIGUSR1, SIGUSR2, and before the job's time limit")
    margin_s: float = Field(30.0, ge=0, description="seconds to be left at the time limit, beside a checkpoint's")
    every_s: float = Field(5.0, gt=0, description="seconds between looks, in which all ranks take part")


class DataConfig(Settings):
    """What the model is trained on."""

    path: str | None = Field(None, description="HDF5 file of the data set; none is the job's own")
    parallel: bool = Field(True, description="read through parallel HDF5 (mpio) where h5py has it")
    prefetch: int = Field(0, ge=0, description="batches that a thread reads ahead; worth it on slow file systems")


class JobConfig(Settings):
    """A training run's specification."""

    strategy: StrategyConfig = Field(default_factory=StrategyConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    leave: LeaveConfig = Field(default_factory=LeaveConfig)
    model: dict[str, Any] = Field(default_factory=dict, description="options of the job's model")
    epochs: int = Field(1, ge=1, description="passes over the data")
    batch_size: int = Field(32, ge=1, description="samples per worker and step")
    seed: int = Field(0, ge=0, lt=1 << 32, description="of all that is random: initial parameters, shuffling, peers")
    clip_norm: float | None = Field(None, gt=0, description="largest norm of a gradient; none does not clip")
    amp: Literal["off", "bf16", "fp16"] = Field("off", description="type of automatic mixed precision on GPUs")
    on_nonfinite: Literal["stop", "skip"] = Field("stop", description="what to do at a NaN or infinite gradient")
    eval_every: int = Field(1, ge=1, description="epochs between evaluations")
    log_every: int = Field(50, ge=1, description="steps between lines of progress")
    output: str = Field("runs", min_length=1, description="folder for records, summary and checkpoints")
    deadline_s: float = Field(300.0, gt=0, description="longest wait for another rank, in seconds")
    across: str = Field("auto", description="how windows reach other nodes: auto, tcp, rma, or tcp:INTERFACE")
    gpu_aware_mpi: bool = Field(False, description="give MPI the memory of GPUs itself; false stages it on the host")

    @model_validator(mode="after")
    def _schedule_fits(self) -> JobConfig:
        self.schedule.build(self.optimizer.build([torch.zeros(1, 1, requires_grad=True)]))
        return self


def optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """The optimizers of torch.optim by name."""
    return _subclasses(torch.optim, torch.optim.Optimizer)


def schedules() -> dict[str, type[torch.optim.lr_scheduler.LRScheduler]]:
    """The schedules of torch.optim.lr_scheduler by name, but for those made of functions or of other schedules."""
    known = _subclasses(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    return {name: schedule for name, schedule in known.items() if name not in _NOT_IN_A_TABLE}


def _subclasses(module: Any, base: type) -> dict[str, type]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base and not name.startswith("_")
    }


def _check_options(where: str, algorithm: type, options: dict[str, Any]) -> None:
    # Of __init__'s parameters, self and the next (parameters or optimizer) are not the user's to give.
    known = list(inspect.signature(algorithm.__init__).parameters)[2:]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"{where} option must be one of {', '.join(sorted(known))} for {algorithm.__name__}; got {option!r}."
                f"{suggestion(option, known)}"
            )


def _call(where: str, algorithm: Callable[..., Any], target: Any, options: dict[str, Any]) -> Any:
    try:
        return algorithm(target, **options)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"{where} options must suit torch's {algorithm.__name__}; got {options} ({error}). See torch's reference."
        ) from None
