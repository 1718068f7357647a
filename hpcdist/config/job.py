"""The configuration of a training job."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import field_validator
from torch.optim.lr_scheduler import OneCycleLR

from hpcdist.config.optimizer import OWN_RATES, OptimizerConfig, ScheduleConfig
from hpcdist.config.settings import Field, MayChange, Named, Settings, joint_rule
from hpcdist.errors import ConfigError


class StrategyConfig(Named):
    """The distribution strategy by name, with options that its `Config` checks."""

    name: str = Field("allreduce", "distribution strategy, see `hpcdist strategies`; or path/to/file.py:Class")


class CheckpointConfig(Settings):
    """When checkpoints are saved, and where."""

    every_s: float = Field(300.0, "seconds between checkpoints on real ranks; 0 saves none by time", ge=0)
    every_steps: int = Field(0, "steps between checkpoints; 0 saves none by steps", ge=0)
    keep: int = Field(2, "number of the newest checkpoints that are kept", ge=1)
    best: bool = Field(True, "save and keep also the checkpoint of the best evaluation")
    background: bool = Field(True, "write checkpoints while the training goes on, from copies in memory")
    folder: str | None = Field(None, "folder of checkpoints; none is `checkpoints` in the output folder")


class BudgetConfig(Settings):
    """Limits of a run, which ends after the first step that reaches one of them."""

    samples: int | None = Field(None, "samples, of all ranks together", ge=1)
    steps: int | None = Field(None, "steps of a worker", ge=1)
    seconds: float | None = Field(None, "seconds of training, without evaluations and checkpoints", gt=0)

    @property
    def given(self) -> bool:
        return any(limit is not None for limit in (self.samples, self.steps, self.seconds))


class StopConfig(Settings):
    """The end of a run that gets no better."""

    patience: int | None = Field(
        None, "evaluations without a better metric after which the run ends; none never ends it so", ge=1
    )
    metric: str | None = Field(None, "the metric that counts, also for the best checkpoint; none: the first")


class LeaveConfig(Settings):
    """Leaving early with a checkpoint, from which --resume continues."""

    enabled: bool = Field(True, "leave on Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2, and before the job's time limit")
    margin_s: float = Field(30.0, "seconds to spare at the time limit, after saving a checkpoint", ge=0)
    every_s: float = Field(5.0, "seconds between checks, in which all ranks take part", gt=0)


class DataConfig(Settings):
    """The data set and how it is read."""

    path: Annotated[str | None, MayChange] = Field(
        None, "HDF5 file of the data set; none: the job's own file or Datasets"
    )
    parallel: Annotated[bool, MayChange] = Field(True, "read through parallel HDF5 (mpio) where h5py has it")
    split: Literal["any", "dirichlet"] = Field(
        "any",
        "samples that a worker gets: any, drawn anew in each epoch; dirichlet: always its own ones, in "
        "which some labels are more frequent than in others",
    )
    alpha: float = Field(1.0, "of dirichlet: with 0.1 a worker has few labels, with 100 all alike", gt=0)
    prefetch: Annotated[int, MayChange] = Field(
        0, "batches that a thread reads ahead of a file; worth it on slow file systems", ge=0
    )
    num_workers: Annotated[int, MayChange] = Field(
        0, "processes of each rank that read samples of the job's torch Datasets ahead", ge=0
    )


class ParallelConfig(Settings):
    """A model in stages, as a pipeline. With one stage every rank holds the whole model."""

    stages: Annotated[int, MayChange] = Field(1, "ranks that hold one whole model together; 1 is no pipeline", ge=1)
    micro_batches: int = Field(4, "parts of a batch, which follow each other through the pipeline", ge=1)
    schedule: Annotated[str, MayChange] = Field(
        "one_f_one_b", "order of the ranks' work: one_f_one_b, gpipe, interleaved, zero_bubble, file.py:table"
    )
    chunks: Annotated[int, MayChange] = Field(1, "stages of each rank, such as 2 with the schedule interleaved", ge=1)
    recompute: Annotated[bool, MayChange] = Field(
        False, "compute activations again in the backward pass instead of keeping them"
    )
    cut: Annotated[Literal["measured"] | tuple[int, ...] | None, MayChange] = Field(
        None, "layers of each stage; measured balances their times, none their parameters"
    )
    spread: Annotated[bool, MayChange] = Field(False, "let a replica's ranks lie on several nodes")
    routing: Literal["straight", "random"] = Field(
        "straight", "where micro-batches go from stage to stage: to the same replica, or to one drawn for each"
    )

    @joint_rule
    def _check(self) -> None:
        stages, sizes = self.stages * self.chunks, self.sizes
        if sizes is not None and (len(sizes) != stages or min(sizes) < 1):
            raise ValueError(
                f"parallel.cut must be {stages} numbers of layers, at least 1 for each of {self.stages} stages"
                f"{f' times {self.chunks} chunks' * (self.chunks > 1)}; got {', '.join(map(str, sizes)) or 'none'}. "
                "Change them, or leave them out."
            )

    @property
    def whole(self) -> bool:
        return self.stages == 1

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """The given numbers of layers; None if the cut is computed."""
        return None if self.cut == "measured" else self.cut

    @property
    def measures(self) -> bool:
        """Whether layers are measured, to balance their times."""
        return self.cut == "measured" and not self.whole


class JobConfig(Settings):
    """The settings of a training run. Those that are marked `MayChange` may change when it is resumed."""

    strategy: StrategyConfig = Field(default_factory=StrategyConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    checkpoint: Annotated[CheckpointConfig, MayChange] = Field(default_factory=CheckpointConfig)
    stop: Annotated[StopConfig, MayChange] = Field(default_factory=StopConfig)
    leave: Annotated[LeaveConfig, MayChange] = Field(default_factory=LeaveConfig)
    budget: Annotated[BudgetConfig, MayChange] = Field(default_factory=BudgetConfig)
    model: dict[str, Any] = Field(default_factory=dict, description="options of the job's model")
    epochs: Annotated[int | None, MayChange] = Field(1, "passes over the data; with a budget, none is no limit", ge=1)
    batch_size: int = Field(32, "samples per worker (a replica of the model) and step", ge=1)
    accumulation: int = Field(1, "batches per worker and step, whose gradients add up to their mean", ge=1)
    seed: int = Field(0, "seed of the initial parameters, of shuffling and of peers", ge=0, lt=1 << 32)
    clip_norm: float | None = Field(None, "largest norm of a gradient; none does not clip", gt=0, allow_inf_nan=True)
    amp: Literal["off", "bf16", "fp16"] = Field("off", "type of automatic mixed precision on GPUs")
    on_nonfinite: Literal["stop", "skip"] = Field("stop", "action at a NaN or infinite gradient")
    max_skipped: Annotated[int, MayChange] = Field(100, "number of skipped steps in a row that ends the run", ge=1)
    average_iterates: bool = Field(False, "on one rank: evaluate the average of the steps' parameters")
    eval_every: int = Field(1, "epochs between evaluations", ge=1)
    eval_every_samples: Annotated[int | None, MayChange] = Field(
        None, "samples between further evaluations, of all ranks together; none makes no further ones", ge=1
    )
    log_every: Annotated[int, MayChange] = Field(50, "steps between lines of progress", ge=1)
    log: Annotated[tuple[str, ...], MayChange] = Field(
        (), "tools to write for: tensorboard, wandb, mlflow, file.py:Class"
    )
    output: Annotated[str, MayChange] = Field("runs", "folder for records, summary and checkpoints", min_length=1)
    deadline_s: Annotated[float, MayChange] = Field(
        300.0, "longest wait for another rank, in seconds", gt=0, allow_inf_nan=True
    )
    internode: Annotated[str, MayChange] = Field(
        "auto", "transport of windows to other nodes: auto, tcp, rma, or tcp:INTERFACE"
    )
    gpu_aware_mpi: Annotated[bool, MayChange] = Field(
        False, "give MPI the memory of GPUs itself; false stages it on the host"
    )

    @field_validator("log", mode="before")
    @classmethod
    def _one_tool_is_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @joint_rule
    def _fits_together(self) -> None:
        if "accumulation" in self.strategy.options:
            raise ConfigError(
                "strategy.accumulation must be omitted in a job, whose own setting goes with every strategy; got "
                f"{self.strategy.options['accumulation']}. Set accumulation instead."
            )
        if not self.parallel.whole and self.parallel.micro_batches > self.batch_size:
            raise ConfigError(
                f"parallel.micro_batches must be at most batch_size, {self.batch_size}; got "
                f"{self.parallel.micro_batches}. Each has a sample or more: take larger batches or fewer of them."
            )
        if self.budget.given and "epochs" not in self.model_fields_set:
            self.__dict__["epochs"] = None
        if self.epochs is None and not self.budget.given:
            raise ConfigError(
                "epochs must be given without a budget; got none. Give it, or budget.samples, budget.steps or "
                "budget.seconds."
            )

    @joint_rule
    def _schedule_fits(self) -> None:
        if self.optimizer.scale != "none" and self.schedule.name in OWN_RATES:
            raise ConfigError(
                f"optimizer.scale must be none with {self.schedule.name}, whose own options say the rates; got "
                f"{self.optimizer.scale!r}. Leave it out."
            )
        # Built for a dummy parameter: torch checks the options, and a OneCycleLR has its total_steps.
        schedule = self.schedule.build(self.optimizer.build([torch.zeros(1, 1, requires_grad=True)]))
        setting, limit = ("budget.steps", self.budget.steps) if self.schedule.per == "step" else ("epochs", None)
        total = schedule.total_steps if isinstance(schedule, OneCycleLR) else None
        if total is not None and self.epochs is None and (limit is None or limit > total):
            raise ConfigError(
                f"{setting} must be at most {total} with OneCycleLR, which has rates for so many {self.schedule.per}s; "
                f"got {'none' if limit is None else limit}. Give it, or another schedule.total_steps."
            )

    def with_cut(self, sizes: tuple[int, ...]) -> JobConfig:
        """Return these settings with these numbers of layers for `parallel.cut`."""
        return self.model_copy(update={"parallel": self.parallel.model_copy(update={"cut": sizes})})
