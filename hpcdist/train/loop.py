"""The training loop of all jobs and all strategies, on real and on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hpcdist import checkpoint, session, strategies
from hpcdist.comm.communicator import Communicator
from hpcdist.config.job import JobConfig
from hpcdist.data.loader import Batch, Loader
from hpcdist.errors import ConfigError
from hpcdist.records import StepRecord, Summary
from hpcdist.session import rules
from hpcdist.session.curves import Curves
from hpcdist.session.leaving import Leaving
from hpcdist.session.loader.period import WeightedBatch, joint_batch, period
from hpcdist.session.world import current, require_equal
from hpcdist.strategies.lbfgs.portions import JointBatch
from hpcdist.train import resume
from hpcdist.train.evaluate import IterateAverage, evaluate
from hpcdist.train.job import Job, describe_data, open_data, split_samples
from hpcdist.train.log import Progress, RunLog
from hpcdist.train.numerics import Precision, count_skipped, require_finite
from hpcdist.train.planning import with_measured_cut
from hpcdist.train.replica import StagedReplica, WholeReplica
from hpcdist.train.resume import Position
from hpcdist.train.stop_conditions import EarlyStopping, Saving, StopConditions

T = TypeVar("T")
SAVED_BYTES_S = 100e6  # assumed for the first checkpoint: a slow shared file system


class Trainer:
    """Collective. Runs a job once: trains, evaluates, saves and resumes, with any strategy.

    Args:
        config: the same on all ranks.
        output: folder for records and `summary.json`, created by rank 0.
        report: called with the progress from time to time, on the first surviving rank.
        ends_at: end of the job in seconds since 1970, so that the run leaves before; None if unlimited, or known only
            to another rank.
        listens: leave on a signal, or before `ends_at`.
        judge: called on the first surviving rank after each evaluation but the last; returns a reason to end the run,
            or None.
    """

    def __init__(
        self, job: Job, config: JobConfig, comm: Communicator, output: Path, report: Callable[[Progress], None] | None,
        *, ends_at: float | None = None, listens: bool = False, judge: Callable[[], str | None] | None = None,
    ):  # fmt: skip
        self.job, self.comm, self.output, self._judge = job, comm, output, judge
        session.init(
            comm=comm, deadline_s=config.deadline_s, gpu_aware_mpi=config.gpu_aware_mpi, internode=config.internode
        )
        # Paths of data may differ by node: their content is compared.
        require_equal(comm, config.model_dump(exclude={"output": True, "data": {"path"}}), "configuration")
        self.checkpoints = Path(config.checkpoint.folder or output / "checkpoints")
        self.position = Position()
        self.device = local_device(session.local_rank())
        self.config = config = with_measured_cut(comm, job, config, self.device)
        self.precision = Precision(config.amp, self.device)
        self._create_model()
        self._train, self._test = open_data(job, config, comm, self.replica.columns)
        if isinstance(self.replica, WholeReplica):
            self.replica.unchecked = {"test": self._test, "train": self._train}
        self.stop_conditions = StopConditions(config, comm, self.position, len(self._train))
        self._distribute_samples(self.strategy.config.workers(self.replica.others.size))
        logging_ranks = tuple((number + 1) * config.parallel.stages - 1 for number in self.workers)
        settings = {**config.model_dump(), "strategy": {"name": config.strategy.name, **self.strategy_options}}
        curves = Curves(config.log, settings, comm, logging_ranks, self.optimizer, output, tuple(job.metrics))
        self.log = RunLog(output, config, comm, self.position, self.stop_conditions, report, curves, self.device)
        self._skipped = 0  # consecutive steps
        self._save_s = 3 * sum(flat.nbytes for flat in self.model.params) / SAVED_BYTES_S  # an estimate, two moments
        self._evaluate_s = 0.0
        self.early_stopping = EarlyStopping(job, config)
        leaves, self.leaving = config.leave.enabled, None
        if listens and (leaves or config.checkpoint.every_s):
            margin_s, every_s = config.leave.margin_s, config.leave.every_s
            self.leaving = Leaving(
                comm, ends_at=ends_at if leaves else None, margin_s=margin_s, every_s=every_s, signals=leaves,
                cost_s=lambda: 2.5 * self._save_s, ctrl_c=True,  # a checkpoint may be in flight
            )  # fmt: skip

    def _create_model(self) -> None:
        """Collective. Create the replica, the optimiser and the strategy, with the configured seeds."""
        config = self.config
        torch.manual_seed(config.seed)
        kind = WholeReplica if config.parallel.whole else StagedReplica
        self.replica = kind(self.job, config, self.comm, self.device, self.precision)
        current().grid = self.replica.grid
        self._create_optimizer()
        options = {"on_nonfinite": "skip" if config.amp == "fp16" else config.on_nonfinite, **config.strategy.options}
        fields = strategies.load(config.strategy.name).Config.model_fields
        if "seed" in fields:
            options.setdefault("seed", config.seed)
        session.DistributedOptimizer(
            self.optimizer, self.replica.module, config.strategy.name, clip_norm=config.clip_norm, **options
        )
        if config.amp == "fp16" and self.optimizer.strategy.contract.batch == "portions":
            raise ConfigError(
                f"amp must be off or bf16 with {config.strategy.name}, whose line search needs the exact gradient of "
                "the loss; got fp16. Use bf16."
            )
        self.strategy, self.model = self.optimizer.strategy, self.optimizer.strategy.model
        # ReduceLROnPlateau steps at evaluations.
        self._schedules_steps = config.schedule.per == "step" and not isinstance(self.schedule, ReduceLROnPlateau)
        torch.manual_seed(config.seed + 1 + self.comm.rank)  # dropout must differ between ranks, stages too
        self.strategy.records.write = self._write
        self.average = IterateAverage(self.model, self.replica.others) if config.average_iterates else None

    def _create_optimizer(self) -> None:
        """Create the optimiser, with a learning rate scaled by the number of workers if configured."""
        config, strategy = self.config, strategies.load(self.config.strategy.name)
        options = strategy.Config.from_mapping(config.strategy.options, "strategy")
        workers = len(options.workers(self.replica.others.size))
        self.rate_factor = config.optimizer.factor(workers * config.batch_size * config.accumulation)
        self.optimizer: Any = config.optimizer.build(self.replica.module.parameters(), self.rate_factor)
        self.schedule = config.schedule.build(self.optimizer, self.rate_factor)

    def _distribute_samples(self, workers: tuple[int, ...]) -> None:
        """Divide the samples of the next epochs among these replicas."""
        self.workers = workers
        if self.config.data.split != "any":
            rules.refuse("joint batches are split by label", self.strategy)
        parts, self.labels = split_samples(self.config, self._train, len(workers))
        self.loader = Loader(
            self._train, self.config.batch_size * self.config.accumulation, fill=True,
            worker=self.workers.index(self.replica.others.rank) if self.strategy.is_worker else 0,
            workers=len(self.workers), seed=self.config.seed, prefetch=self.config.data.prefetch, parts=parts,
        )  # fmt: skip
        self.stop_conditions.global_batch = self.loader.plan.global_batch

    @property
    def strategy_options(self) -> dict[str, Any]:
        """The strategy's options, with its defaults."""
        return self.strategy.config.model_dump()

    # --- the run --------------------------------------------------------------------------------------------------
    def run(self, resume_from: Path | None = None) -> Summary | None:
        """Collective. Train to the end, evaluate, write the summary and return it, the same on every rank.

        None if the run has left early, after saving a checkpoint; `leaving.reason` says why.
        """
        if resume_from is not None:
            resume.load(self, resume_from)
        self.stop_conditions.check_clock(self.log.train_s)
        self.log.open(self.strategy.steps + 1, self.strategy.records.saved)
        self.early_stopping.add(self.log.earlier)
        self.stop_conditions.stopped = self.early_stopping.reason
        self._saving = Saving(self.config, self.leaving)
        try:
            with self.leaving or nullcontext():
                while not self.stop_conditions.ended:
                    self._epoch()
                    if self._leaves:
                        return None
            current().saver.wait()
            if not self.log.metrics:  # resumed from a finished run
                self._write_evaluation()
            return self._on_survivors(self._summarise)
        finally:
            self.log.close()

    @property
    def data(self) -> dict[str, Any]:
        """Source and checksums of the data."""
        return describe_data(self._train, self._test)

    @property
    def _leaves(self) -> bool:
        return self.leaving is not None and self.leaving.reason is not None

    def _epoch(self) -> None:
        """Train to the end of an epoch, or until the run leaves or ends."""
        position = self.position
        self.loader.set_epoch(position.epoch, position.consumed)
        plan = self.loader.plan
        batches, done = iter(self.loader), 0
        while done < plan.steps and not self._leaves and not self.stop_conditions.ended:
            count, samples_before = self._count_steps(plan.steps - done), self.stop_conditions.samples
            self.strategy.records.start()
            with self.log.training():
                self._steps(batches, done, count)
                self._on_survivors(self.comm.barrier)
            done, position.step = done + count, position.step + count
            position.consumed = plan.position(done)
            self.stop_conditions.check_clock(self.log.train_s, count)
            evaluates = self.stop_conditions.evaluates(samples_before) or self.stop_conditions.ended
            self.early_stopping.improved = False  # until the next evaluation
            if done == plan.steps:
                self._end_epoch(evaluates)
            elif evaluates:
                self._write_evaluation()
                self.log.report(position.consumed)
            if self.leaving is not None and not self.stop_conditions.ended:
                remaining = plan.steps - done % plan.steps
                near = min(remaining, self.stop_conditions.steps_to_evaluation or remaining) <= self.leaving.steps
                self.leaving.agree(count, soon_s=self._evaluate_s if near else 0.0)
            is_due = self._saving.is_due(
                position.step, epoch_ends=done == plan.steps, run_ends=self.stop_conditions.ended,
                improved=self.early_stopping.improved,
            )  # fmt: skip
            if is_due or self._leaves:
                with self.comm.trace.span("checkpoint", "run"):
                    self._save()

    def _count_steps(self, remaining: int) -> int:
        """Return the number of steps to the next sync point of all ranks: at most the `remaining` ones of the epoch."""
        every = self.config.checkpoint.every_steps
        limits = [remaining, self.stop_conditions.steps or remaining]
        if every:
            limits.append(every - self.position.step % every)
        if self.leaving is not None:
            limits.append(self.leaving.steps)
        return min(limits)

    def _save(self) -> None:
        """Collective. Save a checkpoint, once all parameters are known to be finite."""
        self.log.flush()  # the records of a checkpoint's steps must be in the files
        self._require_finite()  # else this checkpoint might replace the last good one
        best = self.early_stopping.steps if self.config.checkpoint.best else []
        keep, continues = self.config.checkpoint.keep, not (self._leaves or self.stop_conditions.ended)
        options = {"keep": keep, "best": best, "background": self.config.checkpoint.background and continues}
        self._on_survivors(lambda: resume.save(self, self.checkpoints, **options))
        self._save_s = current().saver.seconds or self._save_s

    def _end_epoch(self, evaluates: bool) -> None:
        """Go to the next epoch; `evaluates`: evaluate, whatever `eval_every` says."""
        self.position.epoch, self.position.consumed = self.position.epoch + 1, 0
        evaluates = evaluates or self.stop_conditions.ended or self.position.epoch % self.config.eval_every == 0
        if evaluates:
            self._write_evaluation()
        lost = set(self.replica.others.failures.lost).intersection(self.workers)
        if lost:
            self._distribute_samples(tuple(rank for rank in self.workers if rank not in lost))
        if isinstance(self.schedule, ReduceLROnPlateau):
            if evaluates:
                self.schedule.step(self.log.metrics["loss"])  # the same on all ranks
        elif self.schedule is not None and self.config.schedule.per == "epoch":
            self.schedule.step()
        self.log.end_epoch()

    def _write_evaluation(self) -> None:
        """Collective. Evaluate, write the metrics, and check whether the run should stop."""
        start = self.comm.now()
        with self.comm.trace.span("evaluation", "run"):
            self._evaluate()
        self.log.write_evaluation()
        self.early_stopping.add([(self.position.step, self.log.metrics)])
        self.stop_conditions.stopped = self.early_stopping.reason
        if self._judge is not None and not self.stop_conditions.ended:
            self.stop_conditions.stopped = self._on_survivors(self._ask_judge)
        self._evaluate_s = self.comm.now() - start

    def _ask_judge(self) -> str | None:
        """Collective. Return the judge's reason to end the run, or None, the same on all ranks."""
        judge, leader = cast(Callable[[], str | None], self._judge), self.comm.failures.alive[0]
        reason = self.comm.raise_on_all_ranks(lambda: judge() if self.comm.rank == leader else None)
        return self.comm.gather(reason)[leader]

    def _evaluate(self) -> None:
        """Collective. Evaluate the consensus, or the average of the iterates, and set the log's metrics."""
        self._require_finite()
        average = self.average
        with nullcontext() if average is None else self.model.swapped(average.params, average.buffers):
            self.log.joules, self.log.metrics = self._on_survivors(self._evaluated)

    def _evaluated(self) -> tuple[float | None, dict[str, float]]:
        joules = self.log.energy.result().joules
        return joules, evaluate(self.job, self.strategy, self.comm, self._test, self.replica.others)

    def _require_finite(self) -> None:
        self._on_survivors(lambda: require_finite(self.strategy, self.comm, self.position.step))

    def _on_survivors(self, action: Callable[[], T]) -> T:
        """Collective. Return the result of `action`; if a rank dies meanwhile, the surviving ranks run it again."""

        def shrunk() -> T:
            self.strategy.shrink()
            self.replica.require_whole(self.comm.failures.lost)
            return action()

        return self.comm.failures.retry_on_failure(shrunk, self.strategy.comm.failures)

    def _steps(self, batches: Iterator[Batch], first: int, count: int) -> None:
        """Take `count` steps of this epoch from step `first` on, to a sync point. Servers serve until then."""
        steps = range(first, first + count)
        portions = self.strategy.contract.batch == "portions"
        take_step = self._step_in_portions if portions else self._step
        for step, batch in enumerate(period([self.optimizer], self._weighted(batches, steps, portions)), first):
            take_step(*batch)
            if (step + 1) % self.config.log_every == 0:
                self.log.report(self.loader.plan.position(step + 1))

    def _weighted(self, batches: Iterator[Batch], steps: Iterable[int], portions: bool) -> Iterator[WeightedBatch]:
        """Yield this worker's batches of these steps; or all workers' samples, of which each may read any portion."""
        plan, worker = self.loader.plan, self.workers.index(self.replica.others.rank)
        for step in steps:
            if portions:
                batch: Any = joint_batch(plan, step, worker, self.strategy.config)  # indices and their description
                self.strategy.joint, weight = batch[1], 1.0
            else:
                batch, weight = next(batches), plan.weight(step, worker)
            yield WeightedBatch(batch, weight, ends_epoch=step == plan.steps - 1)

    def _step_in_portions(self, indices: np.ndarray, joint: JointBatch) -> None:
        """Take a step in which L-BFGS evaluates portions of a joint batch: slices of its samples' `indices`."""
        batch_samples = self.config.batch_size * self.config.accumulation

        def evaluate(portion: slice) -> torch.Tensor:
            x, y = (tensor.to(self.device) for tensor in self._train.batch(indices[portion]))
            self.comm.compute(len(x) / batch_samples)
            return cast(WholeReplica, self.replica).backward_part(x, y, len(x))

        self._end_step(joint.share, self.optimizer.step(evaluate).item())

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Take a step on this worker's batch; a padding batch (weight 0) is computed, but not counted."""
        x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

        def evaluate() -> torch.Tensor:
            self.optimizer.zero_grad()
            return self.replica.backward(self.optimizer, x, y)

        self._end_step(
            len(x) if self.model.gradients.weight else 0, self.precision.step(self.optimizer, evaluate).item()
        )

    def _end_step(self, samples: int, loss: float) -> None:
        """Advance schedule and average, and write the step's record with its number of samples."""
        if self.schedule is not None and self._schedules_steps:
            self.schedule.step()
        if self.average is not None:
            self.average.add()
        record = self.optimizer.record
        if samples:
            record = replace(record, samples=samples, loss=loss)
        self._write(record)

    def _write(self, record: StepRecord) -> None:
        """Write the record of a step; raise NonFiniteError after too many skipped ones."""
        is_logging, loss = self.strategy.records.is_logging, record.loss
        self.log.write(record if is_logging else replace(record, samples=0, loss=None), loss)
        self._skipped = count_skipped(self._skipped, record, self.config.max_skipped)
        if not self.strategy.is_worker:
            self.log.count_gradients(len(record.staleness))

    def _summarise(self) -> Summary:
        """Collective. Write the run's summary, and return it."""
        self.log.flush()
        params, _ = self.strategy.consensus()
        sha256 = self.replica.digest(self.model, params)
        pending = torch.tensor([self.strategy.records.pending() if self.strategy.records.is_logging else 0])
        self.comm.allreduce(pending)
        self.comm.barrier()  # all records are in the files
        reason = self.stop_conditions.stopped
        stopped = None if reason is None else f"stopped early at step {self.position.step}: {reason}"
        return self.log.summarise(
            sha256, int(pending), workers=len(self.workers), cut=list(self.replica.cut), best=self._best(),
            stopped_early=stopped, test_samples=len(self._test),
        )  # fmt: skip

    def _best(self) -> dict[str, Any] | None:
        """Return the summary's entry on the best evaluation, with the best checkpoint that still exists."""
        if self.early_stopping.best is None:
            return None
        path = checkpoint.best_of(self.checkpoints, self.early_stopping.steps)
        step, value = self.early_stopping.best
        return {"metric": self.early_stopping.metric, "value": value, "step": step, "checkpoint": path and str(path)}

    def close(self) -> None:
        """Collective. Release windows, threads and files."""
        current().saver.close()
        self.strategy.close()
        self.strategy.comm.close()
        self.model.close()
        self.replica.close()
        self._train.close()
        self._test.close()


def local_device(local_rank: int) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")
