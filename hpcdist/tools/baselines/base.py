"""Shared by all baselines: the interface of a library, and a plain training loop."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hpcdist import session
from hpcdist.comm.communicator import Communicator
from hpcdist.config.job import JobConfig, StrategyConfig
from hpcdist.config.optimizer import optimizers
from hpcdist.data.loader import Loader
from hpcdist.errors import ConfigError
from hpcdist.records import StepRecord, Summary, digest
from hpcdist.session.curves import Curves
from hpcdist.train.evaluate import evaluate_replica
from hpcdist.train.job import Job, describe_data, open_data, split_samples
from hpcdist.train.log import Progress, RunLog
from hpcdist.train.loop import local_device
from hpcdist.train.numerics import Precision
from hpcdist.train.resume import Position
from hpcdist.train.stop_conditions import StopConditions


class Library(abc.ABC):
    """Collective. Interface of another library that averages gradients on the ranks of `comm`.

    Attributes:
        name: shown as the strategy.
        remarks: notes about costs that can't be measured from outside the library.
    """

    name: str
    remarks: tuple[str, ...]

    @staticmethod
    def why_not() -> str | None:
        """Return why the library can't be used here; None if it can."""
        return None

    @abc.abstractmethod
    def __init__(self, comm: Communicator, device: torch.device): ...

    @abc.abstractmethod
    def wrap(self, module: nn.Module, optimizer: Optimizer, passes: int) -> tuple[nn.Module, Optimizer]:
        """Collective. Return the wrapped module and optimizer to use in the loop.

        Args:
            passes: backward passes per step (gradient accumulation).
        """

    def adding(self) -> AbstractContextManager[object]:
        """Return the context of a backward pass that only accumulates gradients, such as `no_sync`."""
        return nullcontext()

    def synchronize(self) -> None:
        """Collective. Average gradients over the ranks, unless the backward pass has done so."""

    def stepping(self) -> AbstractContextManager[object]:
        """Return the context of the optimizer's step."""
        return nullcontext()

    @abc.abstractmethod
    def close(self) -> None:
        """Collective. Shut the library down."""


# --- the loop ---------------------------------------------------------------------------------------------------------
class BaselineTrainer:
    """Collective. Train a job once with another library, on the same batches and settings as a `Trainer`.

    A step's seconds count as computing, except those that the library exposes as communication. Bytes are computed for
    a ring all-reduce, 2n(p − 1)/p: no library reports them. Evaluations use rank 0's buffers. There are no checkpoints.

    Args:
        library: averages the gradients.
        job, config, comm, output, report: see `Trainer`.

    Raises:
        ConfigError: the library can't run here, or a setting is not supported by a plain loop.
    """

    leaving = None  # it can't be resumed

    def __init__(
        self,
        library: type[Library],
        job: Job,
        config: JobConfig,
        comm: Communicator,
        output: Path,
        report: Callable[[Progress], None] | None,
        **_listening: Any,
    ):
        _require_plain(config, library.name)
        self.job, self.comm, self.output, self.checkpoints = job, comm, output, output / "checkpoints"
        self.config = config.model_copy(update={"strategy": StrategyConfig(name=library.name)})
        self.strategy_options: dict[str, Any] = {}
        self._n_steps = 0  # taken so far
        self.device, self.position = local_device(session.local_rank()), Position()
        self._train, self._test = open_data(job, config, comm)
        self.data = describe_data(self._train, self._test)
        self._library = library(comm, self.device)
        self._make_model()
        parts, self.labels = split_samples(config, self._train, comm.size)
        self._loader = Loader(
            self._train, config.batch_size * config.accumulation, fill=True, worker=comm.rank, workers=comm.size,
            seed=config.seed, prefetch=config.data.prefetch, parts=parts,
        )  # fmt: skip
        self._stop_conditions = StopConditions(config, comm, self.position, len(self._train))
        self._stop_conditions.global_batch = self._loader.plan.global_batch
        settings, everyone = self.config.model_dump(), tuple(range(comm.size))
        curves = Curves(self.config.log, settings, comm, everyone, self._optimizer, output, tuple(job.metrics))
        self.log = RunLog(output, self.config, comm, self.position, self._stop_conditions, report, curves, self.device)

    def _make_model(self) -> None:
        """Create model and optimizer with the same random numbers as a Trainer, and wrap them with the library."""
        config = self.config
        torch.manual_seed(config.seed)
        self._module = self.job.model(**config.model).to(self.device)
        self.rate_factor = config.optimizer.factor(self.comm.size * config.batch_size * config.accumulation)
        optimizer = config.optimizer.build(self._module.parameters(), self.rate_factor)
        self._wrapped, self._optimizer = self._library.wrap(self._module, optimizer, config.accumulation)
        self._schedule = config.schedule.build(self._optimizer, self.rate_factor)
        self._precision = Precision(config.amp, self.device)
        gradient_bytes = sum(p.numel() * p.element_size() for p in self._module.parameters() if p.requires_grad)
        self._sent_bytes = 2 * (self.comm.size - 1) * gradient_bytes // self.comm.size
        torch.manual_seed(config.seed + 1 + self.comm.rank)  # dropout must differ between ranks

    # --- training -------------------------------------------------------------------------------------------------
    def run(self, resume_from: Path | None = None) -> Summary:
        """Collective. Train to the end, evaluate and write the summary; return it, the same on every rank."""
        self._stop_conditions.check_clock(0.0)
        self.log.open(first_step=1)
        try:
            while not self._stop_conditions.ended:
                self._epoch()
            return self._summarise()
        finally:
            self.log.close()

    def _epoch(self) -> None:
        """Train an epoch, or until a budget is spent, with the evaluations that are due."""
        position, stop_conditions = self.position, self._stop_conditions
        self._loader.set_epoch(position.epoch)
        plan, batches, done = self._loader.plan, iter(self._loader), 0
        while done < plan.steps and not stop_conditions.ended:
            n_steps, old_samples = min(plan.steps - done, stop_conditions.steps or plan.steps), stop_conditions.samples
            with self.log.training():
                for step in range(done, done + n_steps):
                    x, y = next(batches)
                    self._step(x.to(self.device), y.to(self.device), plan.weight(step, self.comm.rank))
                self.comm.barrier()
            done, position.step = done + n_steps, position.step + n_steps
            position.consumed = plan.position(done)
            stop_conditions.check_clock(self.log.train_s, n_steps)
            evaluates = stop_conditions.evaluates(old_samples) or stop_conditions.ended
            if done == plan.steps:
                position.epoch, position.consumed = position.epoch + 1, 0
                evaluates = evaluates or stop_conditions.ended or position.epoch % self.config.eval_every == 0
            if evaluates:
                self._evaluate()
            if done == plan.steps:
                self._advance_schedule("epoch", evaluates)

    def _step(self, x: Tensor, y: Tensor, weight: float) -> None:
        """Take one optimizer step on a batch, and record it; `weight` 0: a padding batch, whose gradient is ignored."""
        start, scaler = self.comm.now(), self._precision.scaler
        self._optimizer.zero_grad()
        loss = self._backward(x, y, weight)
        sync_start = self.comm.now()
        self._library.synchronize()
        communicating_s = self.comm.now() - sync_start
        if self.config.clip_norm is not None:
            scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._module.parameters(), self.config.clip_norm)
        with self._library.stepping():
            scaler.step(self._optimizer)
        scaler.update()
        self._advance_schedule("step")
        self._n_steps, mean_loss = self._n_steps + 1, loss.item()
        computing_s = self.comm.now() - start - communicating_s
        self.log.write(
            StepRecord(
                self._n_steps, clock=self._n_steps, staleness=(0,) if weight else (), samples=len(x) if weight else 0,
                loss=mean_loss if weight else None, bytes_sent=self._sent_bytes,
                messages_sent=2 * (self.comm.size - 1), computing_s=computing_s, communicating_s=communicating_s,
            )
        )  # fmt: skip

    def _backward(self, x: Tensor, y: Tensor, weight: float) -> Tensor:
        """Run the backward passes of a batch, with gradients scaled by `weight`; return its mean loss."""
        parts = list(zip(x.split(self.config.batch_size), y.split(self.config.batch_size), strict=True))
        total = x.new_zeros((), dtype=torch.float64)
        for number, (x_part, y_part) in enumerate(parts, 1):
            with self._library.adding() if number < len(parts) else nullcontext():
                with self._precision.autocast():
                    loss = self.job.loss(self._wrapped(x_part), y_part) * (len(x_part) / len(x))
                self._precision.scaler.scale(loss * weight).backward()
            total += loss.detach()
        return total

    def _advance_schedule(self, unit: str, evaluated: bool = False) -> None:
        """Advance the learning rate after a `step` or an `epoch`; ReduceLROnPlateau only if the epoch was evaluated."""
        if isinstance(self._schedule, ReduceLROnPlateau):
            if evaluated:
                self._schedule.step(self.log.metrics["loss"])
        elif self._schedule is not None and self.config.schedule.per == unit:
            self._schedule.step()

    # --- evaluations and the end ----------------------------------------------------------------------------------
    def _evaluate(self) -> None:
        """Collective. Evaluate the module, with rank 0's buffers, and write the metrics."""
        for buffer in self._module.buffers():  # batch norm's statistics
            self.comm.broadcast(buffer.detach().view(-1), 0)
        self.log.joules = self.log.energy.result().joules
        self.log.metrics = evaluate_replica(self.job, self._module, self.comm, self._test)
        self.log.write_evaluation()

    def _summarise(self) -> Summary:
        self.log.flush()
        self.comm.barrier()
        remarks = [*self._library.remarks, "bytes are computed for a ring all-reduce: the library does not report them"]
        return self.log.summarise(digest(self._module.parameters()), 0, remarks=remarks, test_samples=len(self._test))

    def close(self) -> None:
        self._library.close()
        self._train.close()
        self._test.close()


def _require_plain(config: JobConfig, name: str) -> None:
    """Raise ConfigError if a setting needs more than a plain loop; `name` is the library's."""
    closure = inspect.signature(optimizers()[config.optimizer.name].step).parameters.get("closure")
    violations = {
        "on_nonfinite must be stop": config.on_nonfinite != "stop",
        "stop.patience must be none": config.stop.patience is not None,
        "checkpoint.every_steps must be 0": config.checkpoint.every_steps > 0,
        "optimizer.name must be one that needs no closure": closure is not None and closure.default is closure.empty,
    }
    for rule, broken in violations.items():
        if broken:
            raise ConfigError(f"{rule} with {name}, which has a plain training loop; got another. Remove it.")
