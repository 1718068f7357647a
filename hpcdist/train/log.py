"""The log of a run: records, evaluations and summary in files, and progress reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpcdist.comm.communicator import Communicator
from hpcdist.config.job import JobConfig
from hpcdist.records import (
    Evaluation,
    RecordWriter,
    Sampler,
    StepRecord,
    Summary,
    append_evaluation,
    continue_records,
    keep_evaluations,
    read_evaluations,
    read_records,
    resources_path,
    summarise,
    write_summary,
)
from hpcdist.session.curves import Curves
from hpcdist.train.energy import RunEnergy, gpu_uuid
from hpcdist.train.resume import Position
from hpcdist.train.stop_conditions import StopConditions


@dataclass(frozen=True)
class Progress:
    """The progress of a run, as seen by the first surviving rank."""

    epoch: int  # number of finished epochs
    epochs: int | None  # None if only a budget ends the run
    epoch_samples: int
    step: int  # of a worker
    samples: int  # of all epochs and ranks
    total_samples: int  # an estimate with a budget of steps or seconds
    seconds: float  # of training
    loss: float | None
    metrics: dict[str, float]
    ended: bool = False

    @property
    def left_s(self) -> float | None:
        """Estimate the remaining seconds of training, at the mean speed so far; None before the first samples."""
        if self.ended or not self.samples or self.seconds <= 0:
            return None
        return self.seconds * (self.total_samples / self.samples - 1)


class RunLog:
    """Writes the records, evaluations and summary of a run, and reports its progress.

    Each rank has a file of records and one of resources; the first surviving rank writes everything else, and reports.

    Args:
        folder: of the run.
        position, stop_conditions: of the run.
        report: called with the progress from time to time; may be None.
        curves: passes metrics to other tools.
        device: the device of this rank.

    Attributes:
        train_s: seconds of training so far, without evaluations and checkpoints.
        n_samples: of an epoch.
        energy: of the run, measured while the log is open.
        metrics: of the last evaluation.
        joules: used before the last evaluation; None if not measured.
    """

    _writer: RecordWriter  # from `open` on

    def __init__(
        self, folder: Path, config: JobConfig, comm: Communicator, position: Position, stop_conditions: StopConditions,
        report: Callable[[Progress], None] | None, curves: Curves, device: torch.device | None = None,
    ):  # fmt: skip
        self.train_s, self.energy, self.n_samples = 0.0, RunEnergy(comm, device), stop_conditions.n_samples
        self.metrics: dict[str, float] = {}
        self.joules: float | None = None
        self._folder, self._config, self._comm = folder, config, comm
        self._position, self._stop_conditions, self._report = position, stop_conditions, report
        self._curves, self._device = curves, device
        self._sampler: Sampler | None = None
        self.earlier: list[tuple[int, dict[str, float]]] = []  # evaluations before a resumed run, by step
        self._losses: list[float] = []
        self._gradients = 0  # number that this rank, a server, has applied in this epoch
        self._since: float | None = None  # start of the current training

    def open(self, first_step: int, saved: Sequence[int] = ()) -> None:
        """Collective. Open this rank's file of records, and drop repeated ones; see `continue_records`."""
        self.energy.start()
        self._writer = continue_records(self._folder, self._comm.rank, self._comm.size, first_step, saved)
        if self._is_writer:
            keep_evaluations(self._folder, self._position.step)
        if self._position.step:  # in a resumed run
            kept = [(each.step, each.metrics) for each in read_evaluations(self._folder)] if self._is_writer else []
            self.earlier = self._comm.gather(kept)[self._comm.failures.alive[0]]
        self._curves.open(first_step)
        if self._comm.platform.virtual is None:
            self._sampler = Sampler(resources_path(self._folder, self._comm.rank), gpu_uuid(self._device))

    @property
    def _is_writer(self) -> bool:
        return self._comm.rank == self._comm.failures.alive[0]

    # --- steps ----------------------------------------------------------------------------------------------------
    @contextmanager
    def training(self) -> Iterator[None]:
        """Add the time in the context to the seconds of training."""
        self._since = self._comm.now()
        yield
        self.train_s, self._since = self._seconds(), None

    def _seconds(self) -> float:
        return self.train_s + (0.0 if self._since is None else self._comm.now() - self._since)

    def write(self, record: StepRecord, loss: float | None = None) -> None:
        """Write a record, and keep the batch's loss, which may be in the record of another rank of the replica."""
        self._writer.write(record)
        self._curves.add(record)
        if loss is not None:
            self._losses.append(loss)

    def flush(self) -> None:
        """Write all records so far to the file, where they remain even if this process is killed."""
        self._writer.flush()

    def count_gradients(self, count: int) -> None:
        """Count gradients applied by this rank, a server; report the progress every `log_every` of them."""
        before, self._gradients = self._gradients, self._gradients + count
        if before // self._config.log_every < self._gradients // self._config.log_every:
            done = self._gradients * self._config.batch_size  # an estimate, because not all batches are full
            self.report(min(done, self._stop_conditions.n_samples))

    def end_epoch(self) -> None:
        """Report the end of an epoch, with the position at the start of the next one."""
        self._gradients = 0
        self.report(0)

    def report(self, done: int) -> None:
        """Report the progress, after `done` samples of this epoch."""
        self._curves.report()
        if self._report is not None and self._is_writer:
            recent, epoch_samples = self._losses[-self._config.log_every :], self._stop_conditions.n_samples
            samples = self._position.epoch * epoch_samples + done
            ahead = max(0, done - self._position.consumed)  # since the last sync point, which sets the position
            self._report(
                Progress(
                    epoch=self._position.epoch, epochs=self._config.epochs, epoch_samples=epoch_samples,
                    step=self._position.step + -(-ahead // self._stop_conditions.global_batch), samples=samples,
                    total_samples=self._stop_conditions.total_samples(samples), seconds=self._seconds(),
                    loss=sum(recent) / len(recent) if recent else None, metrics=self.metrics,
                    ended=self._stop_conditions.ended,
                )
            )  # fmt: skip

    # --- evaluations and the summary ------------------------------------------------------------------------------
    def write_evaluation(self) -> None:
        """Write the metrics of the last evaluation, unless a resumed run has them in the file already."""
        step, epoch, samples = self._position.step, self._position.epoch, self._stop_conditions.samples
        new = not self.earlier or step != self.earlier[-1][0]
        if new:
            self._curves.evaluate(step, self.metrics)
        if self._is_writer and new:
            append_evaluation(self._folder, Evaluation(step, epoch, samples, self.train_s, self.metrics, self.joules))

    def summarise(self, sha256: str, pending: int, **further: Any) -> Summary:
        """Collective. Write the summary from the records of all ranks, and return it on every rank.

        Args:
            sha256: of the final parameters.
            pending: number of gradients without an update, of all ranks.
            further: more fields of the summary.
        """
        summary, energy = None, self.energy.result()
        if self._is_writer:
            summary = summarise(
                read_records(self._folder), strategy=self._config.strategy.name, ranks=self._comm.size,
                stages=self._config.parallel.stages, seed=self._config.seed, wall_s=self.train_s, metrics=self.metrics,
                sha256=sha256, pending=pending, lost_ranks=list(self._comm.failures.lost), **further, energy=energy,
            )  # fmt: skip
            write_summary(self._folder, summary)
        summaries = self._comm.gather(None if summary is None else summary.model_dump_json())
        return Summary.model_validate_json(summaries[self._comm.failures.alive[0]])

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
        self.energy.close()
        self._writer.close()
        self._curves.close()
