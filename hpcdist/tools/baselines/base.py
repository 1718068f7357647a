"""What all baselines share: how a library takes part, a plain training loop, and the command line."""

from __future__ import annotations

import abc
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
import typer
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hpcdist import session
from hpcdist.comm.communicator import Communicator
from hpcdist.config import JobConfig, StrategyConfig, optimizers
from hpcdist.data.loader import Batch, Loader
from hpcdist.errors import ConfigError, HpcdistError
from hpcdist.faults.reporter import is_reporter
from hpcdist.records import StepRecord, Summary, digest
from hpcdist.session.curves import Curves
from hpcdist.tools import console
from hpcdist.train import runs
from hpcdist.train.evaluate import evaluate_replica
from hpcdist.train.job import Job, described, open_data, own_samples
from hpcdist.train.log import Progress, RunLog
from hpcdist.train.loop import own_device
from hpcdist.train.numerics import Precision
from hpcdist.train.resume import Position
from hpcdist.train.stop_conditions import StopConditions

if TYPE_CHECKING:
    from hpcdist.comm.mpi.communicator import MpiCommunicator


class Library(abc.ABC):
    """Collective. Start a library on the ranks of `comm`.

    Attributes:
        name: in place of a strategy's.
        remarks: sentences about what can't be measured from outside.
    """

    name: str
    remarks: tuple[str, ...]

    @staticmethod
    def why_not() -> str | None:
        """Return the reason why the library can't be used here; None if it can."""
        return None

    @abc.abstractmethod
    def __init__(self, comm: Communicator, device: torch.device): ...

    @abc.abstractmethod
    def wrap(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, passes: int
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Collective. Return the module to call and the optimiser to step, as the library wants them.

        Args:
            passes: backward passes of a step.
        """

    def adding(self) -> AbstractContextManager[object]:
        """Return the context of a backward pass that only adds to gradients."""
        return nullcontext()

    def synchronize(self) -> None:
        """Collective. Make gradients their means over the ranks, where the backward pass has not."""

    def stepping(self) -> AbstractContextManager[object]:
        """Return the context in which the optimiser steps."""
        return nullcontext()

    @abc.abstractmethod
    def close(self) -> None:
        """Collective. End what was started."""


# --- the loop ---------------------------------------------------------------------------------------------------------
class BaselineTrainer:
    """Collective. Train a job once by a library, on the batches and with the settings that a `Trainer` has.

    A step's seconds are all of computing, but for those that the library lets one measure; bytes are those of a ring,
    2n(p − 1)/p, for no library tells them. Batch statistics are evaluated as rank 0 has them. There are no checkpoints.

    Args:
        library: what averages gradients.
        job, config, comm, output, report: as a Trainer's.

    Raises:
        ConfigError: the library can't run here, or a setting is none of a plain loop's.
    """

    leaving = None  # it can't go on later

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
        self._taken = 0  # steps
        self.device, self.position = own_device(session.local_rank()), Position()
        self._train, self._test = open_data(job, config, comm)
        self.data = described(self._train, self._test)
        self._library = library(comm, self.device)
        self._make_model()
        parts, self.labels = own_samples(config, self._train, comm.size)
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
        """Make model and optimiser as a Trainer does, with the same random numbers, and give them to the library."""
        config = self.config
        torch.manual_seed(config.seed)
        self._module = self.job.model(**config.model).to(self.device)
        self.rate_factor = config.optimizer.factor(self.comm.size * config.batch_size * config.accumulation)
        optimizer = config.optimizer.build(self._module.parameters(), self.rate_factor)
        self._wrapped, self._optimizer = self._library.wrap(self._module, optimizer, config.accumulation)
        self._schedule = config.schedule.build(self._optimizer, self.rate_factor)
        self._precision = Precision(config.amp, self.device)
        sent = sum(p.numel() * p.element_size() for p in self._module.parameters() if p.requires_grad)
        self._sent_bytes = 2 * (self.comm.size - 1) * sent // self.comm.size
        torch.manual_seed(config.seed + 1 + self.comm.rank)

    # --- the run --------------------------------------------------------------------------------------------------
    def run(self, resume_from: Path | None = None) -> Summary:
        """Collective. Train to the end, evaluate and write the summary; return it, the same on every rank."""
        self._stop_conditions.look(0.0)
        self.log.open(first_step=1)
        try:
            while not self._stop_conditions.ended:
                self._epoch()
            return self._summarise()
        finally:
            self.log.close()

    def _epoch(self) -> None:
        """Train an epoch, or its steps until a budget is spent."""
        position, stop_conditions = self.position, self._stop_conditions
        self._loader.set_epoch(position.epoch)
        plan, batches, done = self._loader.plan, iter(self._loader), 0
        while done < plan.steps and not stop_conditions.ended:
            count, before = min(plan.steps - done, stop_conditions.steps or plan.steps), stop_conditions.samples
            self._steps(batches, done, count)
            done, position.step = done + count, position.step + count
            position.consumed = plan.position(done)
            stop_conditions.look(self.log.train_s, count)
            evaluates = stop_conditions.evaluates(before) or stop_conditions.ended
            if done == plan.steps:
                position.epoch, position.consumed = position.epoch + 1, 0
                evaluates = evaluates or stop_conditions.ended or position.epoch % self.config.eval_every == 0
            if evaluates:
                self._evaluate()
            if done == plan.steps:
                self._advance_schedule("epoch", evaluates)

    def _steps(self, batches: Iterator[Batch], first: int, count: int) -> None:
        with self.log.training():
            for step in range(first, first + count):
                x, y = next(batches)
                self._step(x.to(self.device), y.to(self.device), self._loader.plan.weight(step, self.comm.rank))
            self.comm.barrier()

    def _step(self, x: Tensor, y: Tensor, weight: float) -> None:
        start, scaler = self.comm.now(), self._precision.scaler
        self._optimizer.zero_grad()
        loss = self._backward(x, y, weight)
        before = self.comm.now()
        self._library.synchronize()
        communicating_s = self.comm.now() - before
        if self.config.clip_norm is not None:
            scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._module.parameters(), self.config.clip_norm)
        with self._library.stepping():
            scaler.step(self._optimizer)
        scaler.update()
        self._advance_schedule("step")
        self._taken, mean_loss = self._taken + 1, loss.item()
        computing_s = self.comm.now() - start - communicating_s
        self.log.write(
            StepRecord(
                self._taken, clock=self._taken, staleness=(0,) if weight else (), samples=len(x) if weight else 0,
                loss=mean_loss if weight else None, bytes_sent=self._sent_bytes,
                messages_sent=2 * (self.comm.size - 1), computing_s=computing_s, communicating_s=communicating_s,
            )
        )  # fmt: skip

    def _backward(self, x: Tensor, y: Tensor, weight: float) -> Tensor:
        """Run the backward passes of a batch, whose gradients count by its weight; return its mean loss."""
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
        if isinstance(self._schedule, ReduceLROnPlateau):
            if evaluated:
                self._schedule.step(self.log.metrics["loss"])
        elif self._schedule is not None and self.config.schedule.per == unit:
            self._schedule.step()

    # --- evaluations and the end ----------------------------------------------------------------------------------
    def _evaluate(self) -> None:
        for buffer in self._module.buffers():
            self.comm.broadcast(buffer.detach().view(-1), 0)
        self.log.joules = self.log.energy.result().joules
        self.log.metrics = evaluate_replica(self.job, self._module, self.comm, self._test)
        self.log.write_evaluation()

    def _summarise(self) -> Summary:
        self.log.flush()
        self.comm.barrier()
        remarks = [*self._library.remarks, "bytes are those of a ring all-reduce: the library does not tell them"]
        return self.log.summarise(digest(self._module.parameters()), 0, remarks=remarks, test_samples=len(self._test))

    def close(self) -> None:
        """Collective. End the library, and close files."""
        self._library.close()
        self._train.close()
        self._test.close()


def _require_plain(config: JobConfig, name: str) -> None:
    """Check that no setting asks for more than a plain loop does; raise ConfigError otherwise."""
    step = inspect.signature(optimizers()[config.optimizer.name].step).parameters.get("closure")
    wrong = {
        "on_nonfinite must be stop": config.on_nonfinite != "stop",
        "stop.patience must be none": config.stop.patience is not None,
        "checkpoint.every_steps must be 0": config.checkpoint.every_steps > 0,
        "optimizer.name must be one that needs no closure": step is not None and step.default is step.empty,
    }
    for rule, broken in wrong.items():
        if broken:
            raise ConfigError(f"{rule} with {name}, whose loop is as its users write it; got another. Leave it out.")


# --- the command ------------------------------------------------------------------------------------------------------
def train(
    comm: Communicator,
    library: type[Library],
    job: Path,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    output: Path | None = None,
    command: Sequence[str] = (),
) -> Summary:
    """Collective. Train a job by a library in a folder; return the summary, the same on all ranks.

    Settings are those of `hpcdist train`, but for the strategy's, which are left out.

    Raises:
        ConfigError: a setting breaks its rule, is none of the library's, or the folder holds another run.
    """
    own = [setting for setting in overrides if not setting.startswith(("strategy=", "strategy."))]
    make = partial(BaselineTrainer, library)
    _, summary = runs.train(comm, job, config, own, output, command=command, make=make)
    return cast(Summary, summary)  # None is that of a run that leaves early, which no baseline does


def main(library: type[Library]) -> None:
    """Run the command line of a baseline on this rank; end all ranks with status 1 where it fails."""

    def baseline(
        job: Annotated[Path, typer.Argument(help="Python file that defines `job`.")],
        output: Annotated[Path, typer.Option(metavar="FOLDER", help="This run's folder.")],
        config: Annotated[Path | None, typer.Option(metavar="TOML", help="File of settings.")] = None,
        overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    ) -> None:
        comm = session.init(run=False)
        try:
            summary = train(comm, library, job, config, overrides or [], output, sys.argv)
        except HpcdistError as error:
            if comm.size == 1 or is_reporter(comm.rank):
                console.error(str(error))
            if comm.size > 1:
                cast("MpiCommunicator", comm).abort(1)
            raise typer.Exit(1) from None
        if comm.rank == 0:
            console.result(output, summary)

    typer.run(baseline)
