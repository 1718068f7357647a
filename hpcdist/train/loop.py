"""The training loop: the only one, for every job and every strategy, on real and on virtual ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hpcdist import session, strategies
from hpcdist.comm.communicator import Communicator
from hpcdist.config import JobConfig
from hpcdist.data.hdf5 import HDF5Dataset
from hpcdist.data.loader import Batch, Loader
from hpcdist.records import (
    RecordWriter,
    StepRecord,
    Summary,
    digest,
    read_records,
    record_path,
    summarise,
    write_summary,
)
from hpcdist.session.leaving import Leaving
from hpcdist.session.world import require_equal
from hpcdist.train import resume
from hpcdist.train.evaluate import evaluate
from hpcdist.train.job import Job
from hpcdist.train.precision import Precision

T = TypeVar("T")
SAVED_BYTES_S = 100e6  # how fast a checkpoint is written until one has been: a slow shared file system


@dataclass
class Position:
    """Where a run stands, in numbers that don't depend on the number of ranks but for `step`."""

    epoch: int = 0
    consumed: int = 0  # samples of this epoch, all ranks together
    step: int = 0  # since the run began


@dataclass(frozen=True)
class Progress:
    """What a run has to show while it goes on, as the first living rank sees it."""

    epoch: int
    epochs: int
    samples: int  # of all epochs, all ranks together
    total_samples: int
    seconds: float
    loss: float | None
    metrics: dict[str, float]


class Trainer:
    """Collective. One run of a job.

    Args:
        config: as checked by `JobConfig`; the same on all ranks.
        comm: the ranks that take part.
        output: folder for records and `summary.json`; made by rank 0.
        report: called now and then with the run's progress, on rank 0, or the first rank that lives.
        ends_at: when the job is ended from outside, in seconds since 1970, so that the run leaves before; None for
            never, or where another rank knows.
        listens: whether the run leaves on a signal, or before `ends_at`.
    """

    def __init__(
        self,
        job: Job,
        config: JobConfig,
        comm: Communicator,
        output: Path,
        report: Callable[[Progress], None] | None,
        *,
        ends_at: float | None = None,
        listens: bool = False,
    ):
        self.job, self.config, self.comm, self.output = job, config, comm, output
        self._report = report
        session.init(
            comm=comm,
            deadline_s=config.deadline_s,
            gpu_aware_mpi=config.gpu_aware_mpi,
            across=config.across,
        )
        require_equal(comm, config.model_dump(exclude={"output", "data"}), "configuration")
        self.checkpoints = Path(config.checkpoint.folder or output / "checkpoints")
        self.position, self.train_s, self.metrics = Position(), 0.0, {}
        self.device = _device(session.local_rank())
        self._make_model()
        self._open_data()
        self.precision = Precision(config.amp, self.device)
        self._writer: RecordWriter | None = None
        self._losses: list[float] = []
        self._gradients = 0  # that a server has applied in this epoch
        self._save_s = 3 * self.model.n_bytes / SAVED_BYTES_S  # with two moments; a guess
        self._evaluate_s = 0.0
        self.leaving: Leaving | None = None
        if listens and config.leave.enabled:
            margin_s, every_s = config.leave.margin_s, config.leave.every_s
            self.leaving = Leaving(
                comm, ends_at=ends_at, margin_s=margin_s, every_s=every_s, cost_s=lambda: 1.5 * self._save_s
            )

    def _make_model(self) -> None:
        config = self.config
        torch.manual_seed(config.seed)
        module = self.job.model(**config.model).to(self.device)
        self.optimizer = config.optimizer.build(module.parameters())
        self.schedule = config.schedule.build(self.optimizer)
        options = {"on_nonfinite": "skip" if config.amp == "fp16" else config.on_nonfinite, **config.strategy.options}
        fields = strategies.load(config.strategy.name).Config.model_fields
        if "seed" in fields:
            options.setdefault("seed", config.seed)
        if config.amp == "fp16" and strategies.load(config.strategy.name).reduces_in_backward:
            options["overlap"] = "off"  # gradients are divided by the loss scale after the backward pass
        session.DistributedOptimizer(
            self.optimizer, module, config.strategy.name, clip_norm=config.clip_norm, **options
        )
        self.strategy, self.model = self.optimizer.strategy, self.optimizer.strategy.model
        # A plateau's schedule looks at evaluations.
        if self.schedule and config.schedule.per == "step" and not isinstance(self.schedule, ReduceLROnPlateau):
            self.optimizer.register_step_post_hook(lambda *_: self.schedule.step())  # where updates are made
        torch.manual_seed(config.seed + 1 + self.comm.rank)  # dropout and the like differ between ranks
        self.strategy.on_record = self._write

    def _open_data(self) -> None:
        path = Path(self.config.data.path)
        if self.comm.rank == 0 and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self.job.data(path)
        self.comm.barrier()
        mpi = self.comm.mpi if self.config.data.parallel else None
        self._train, self._test = (HDF5Dataset(path, split, mpi_comm=mpi) for split in ("train", "test"))
        self._deal_samples(self.strategy.worker_ranks(self.strategy.config, self.comm.size))

    def _deal_samples(self, workers: tuple[int, ...]) -> None:
        """Shares the samples of the epochs to come among these ranks."""
        self.workers = workers
        self.loader = Loader(
            self._train,
            self.config.batch_size,
            worker=self.workers.index(self.comm.rank) if self.strategy.is_worker else 0,
            workers=len(self.workers),
            seed=self.config.seed,
            prefetch=self.config.data.prefetch,
        )

    # --- the run --------------------------------------------------------------------------------------------------
    def run(self, resume_from: Path | None = None) -> Summary | None:
        """Collective. Trains to the end, evaluates, writes the summary; the same on every rank.

        None if the run has left early, after its newest checkpoint; `leaving.reason` says why.
        """
        if resume_from is not None:
            resume.load(self, resume_from)
        self._writer = RecordWriter(record_path(self.output, self.comm.rank), first_step=self.strategy.steps + 1)
        try:
            with self.leaving or nullcontext():
                while self.position.epoch < self.config.epochs:
                    self._epoch()
                    if self._leaves:
                        return None
            if not self.metrics:  # resumed from the very end
                self._evaluate()
            return self._surviving(self._summarise)
        finally:
            self._writer.close()

    @property
    def _leaves(self) -> bool:
        return self.leaving is not None and self.leaving.reason is not None

    def _epoch(self) -> None:
        """The rest of an epoch, or what can be done of it before the run leaves."""
        position, every = self.position, self.config.checkpoint.every_steps
        self.loader.set_epoch(position.epoch, position.consumed)
        plan = self.loader.plan
        batches, done = iter(self.loader), 0
        while done < plan.steps and not self._leaves:
            count = min(plan.steps - done, every - position.step % every if every else plan.steps)
            if self.leaving is not None:
                count = min(count, self.leaving.steps)
            self._timed(lambda: self._steps(batches, done, count))
            done, position.step = done + count, position.step + count
            position.consumed = plan.position(done)
            if done == plan.steps:
                self._end_epoch()
            saves = every > 0 and position.step % every == 0
            if saves:
                self._save()
            if self.leaving is not None and position.epoch < self.config.epochs:
                near = plan.steps - done % plan.steps <= self.leaving.steps
                if self.leaving.meet(count, soon_s=self._evaluate_s if near else 0.0) and not saves:
                    self._save()

    def _save(self) -> None:
        self._writer.flush()  # what a checkpoint stands for has been recorded, even if this process is killed
        start = self.comm.now()
        self._surviving(lambda: resume.save(self, self.checkpoints, self.config.checkpoint.keep))
        self._save_s = self.comm.now() - start

    def _end_epoch(self) -> None:
        self.position.epoch, self.position.consumed = self.position.epoch + 1, 0
        self._gradients = 0
        if self.position.epoch % self.config.eval_every == 0 or self.position.epoch == self.config.epochs:
            start = self.comm.now()
            self._evaluate()
            self._evaluate_s = self.comm.now() - start
        left = tuple(rank for rank in self.workers if rank in self.comm.living)
        if left != self.workers:
            self._deal_samples(left)
        if isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step(self.metrics.get("loss", math.inf))  # the same on all ranks
        elif self.schedule is not None and self.config.schedule.per == "epoch":
            self.schedule.step()
        self._show(self.position.epoch * len(self._train))

    def _evaluate(self) -> None:
        self.metrics = self._surviving(lambda: evaluate(self.job, self.strategy, self.comm, self._test))

    def _surviving(self, action: Callable[[], T]) -> T:
        """Collective. What `action` returns, on all ranks that live; see Communicator.surviving."""

        def healed() -> T:
            self.strategy.heal()
            return action()

        return self.comm.surviving(healed, self.strategy.comm)

    def _timed(self, work: Callable[[], None]) -> None:
        self.strategy.start()
        start = self.comm.now()
        work()
        self._surviving(self.comm.barrier)
        self.train_s += self.comm.now() - start

    def _steps(self, batches: Iterator[Batch], first: int, count: int) -> None:
        """`count` steps of this epoch from step `first` on; servers serve meanwhile."""
        if not self.strategy.is_worker:
            self.strategy.serve(self.optimizer.update)
            return
        plan, worker = self.loader.plan, self.workers.index(self.comm.rank)
        for step in range(first, first + count):
            sizes = plan.sizes(step)
            self.model.weight = sizes[worker] * len(sizes) / sum(sizes)
            if sizes[worker]:
                self._step(*next(batches))
            else:
                self.optimizer.join()
                if self.optimizer.record is not None:
                    self._write(self.optimizer.record)
            if (step + 1) % self.config.log_every == 0:
                self._show(self.position.epoch * len(self._train) + plan.position(step + 1))
        self.strategy.pause()

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

        def evaluate() -> torch.Tensor:
            self.optimizer.zero_grad()
            self.comm.compute()
            with self.precision.autocast():
                loss = self.job.loss(self.model.module(x), y)
            self.precision.backward(loss, self.model)
            return loss

        self._losses.append(self.optimizer.step(evaluate).item())
        record = self.optimizer.record
        self.precision.step_done(skipped=(record.event or "").startswith("skipped"))
        self._write(replace(record, samples=len(x), loss=self._losses[-1]))

    # --- what is written ------------------------------------------------------------------------------------------
    def _write(self, record: StepRecord) -> None:
        self._writer.write(record)
        if not self.strategy.is_worker and record.staleness:
            before, self._gradients = self._gradients, self._gradients + len(record.staleness)
            if before // self.config.log_every < self._gradients // self.config.log_every:
                # An estimate, for not all batches are full.
                epoch, samples = self.position.epoch, len(self._train)
                self._show(min(epoch * samples + self._gradients * self.config.batch_size, (epoch + 1) * samples))

    def _show(self, samples: int) -> None:
        if self._report is not None and self.comm.rank == self.comm.living[0]:
            recent = self._losses[-self.config.log_every :]
            self._report(
                Progress(
                    epoch=self.position.epoch,
                    epochs=self.config.epochs,
                    samples=samples,
                    total_samples=self.config.epochs * len(self._train),
                    seconds=self.train_s,
                    loss=sum(recent) / len(recent) if recent else None,
                    metrics=self.metrics,
                )
            )

    def _summarise(self) -> Summary:
        self._writer.flush()
        params, _ = self.strategy.consensus()
        pending = torch.tensor([self.strategy.pending])
        self.comm.allreduce(pending)
        self.comm.barrier()  # all records are in the files
        summary, first = None, self.comm.living[0]
        if self.comm.rank == first:
            summary = summarise(
                read_records(self.output),
                strategy=self.config.strategy.name,
                ranks=self.comm.size,
                seed=self.config.seed,
                wall_s=self.train_s,
                metrics=self.metrics,
                sha256=digest(params),
                pending=int(pending),
                lost_ranks=list(self.comm.lost),
            )
            write_summary(self.output, summary)
        found = self.comm.exchange(b"" if summary is None else summary.model_dump_json().encode())
        return Summary.model_validate_json(found[first])

    def close(self) -> None:
        """Collective. Releases windows, threads and files."""
        self.strategy.close()
        self.strategy.comm.close()
        self.model.close()
        self._train.close()
        self._test.close()


def _device(local_rank: int) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")
