"""Distribute the samples of the user's DataLoader among workers, each sample to one."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, IterableDataset

from hpcdist.comm.communicator import Communicator
from hpcdist.data.labels import labels_of
from hpcdist.data.sharding import EpochPlan
from hpcdist.session import rules
from hpcdist.session.consensus import consensus_of
from hpcdist.session.consistency import changed_fingerprints, fingerprints, require_same_loader, start_epoch
from hpcdist.session.loader.batches import AroundLoader, count_samples, counting_message, same_on_all_ranks
from hpcdist.session.loader.period import Epoch, WeightedBatch, gather_counts, joint_batch, period, relative_weight
from hpcdist.session.loader.sampling import Order, identical_batches, iterate_with_worker_seed, sample_order
from hpcdist.session.run import LoopRun
from hpcdist.session.values import broadcast_in
from hpcdist.session.world import count_collective_calls, current, refuse_calls_of_servers
from hpcdist.strategies import Strategy

_log = logging.getLogger("hpcdist")
_UPDATE_BN = inspect.unwrap(update_bn).__code__  # it is wrapped in torch.no_grad()

_LOADER_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers"),
)


def shard(
    loader: DataLoader[Any],
    *,
    seed: int = 0,
    training: bool = True,
    split: bool | Literal["dirichlet"] = True,
    alpha: float = 1.0,
    labels: Sequence[int] | Tensor | None = None,
    optimizers: Sequence[torch.optim.Optimizer] | None = None,
) -> ShardedLoader:
    """Return a loader of this rank's share of `loader`: each sample exactly once per epoch, on any number of ranks.

    `loader.batch_size` is the batch size of each worker. A shuffling loader is shuffled by (seed, epoch), the same on
    all ranks; a DistributedSampler is replaced; any other sampler, or batch sampler, is sampled on the first worker,
    for all ranks. All workers get a batch in every step. In the last step, which may have fewer samples, gradients are
    weighted by sample counts; a worker without samples gets a padding batch of weight 0, whose gradient is ignored.

    Batches of an iterable data set that is identical on all ranks are distributed; if ranks' data differ, each reads
    its data to the end. An iterable data set of whole batches may be passed instead of a loader.

    With sandblaster every worker gets the joint batch of all workers, and `optimizer.step` calls its closure with the
    slice that this worker computes. On a server rank the iterator yields nothing, and serves until the workers end the
    epoch. Without gradients (inside `torch.no_grad()`, or `torch.optim.swa_utils.update_bn`) it is the plain loader:
    every rank gets all samples, and the epoch isn't counted.

    For a model in stages (`hpcdist.pipeline`) samples are distributed among replicas: all ranks of a replica get the
    same batches, whose loading uses random numbers seeded by `seed`, epoch and replica (for an iterable data set that
    is split: by `seed` and epoch). The ranks of a replica compare their first batch of each epoch.

    Example:
        >>> loader = hd.shard(torch.utils.data.DataLoader(data, batch_size=2, shuffle=True))
        >>> optimizer = hd.DistributedOptimizer(sgd, model)
        >>> len(loader)  # steps per epoch: 8 samples, 2 workers
        2

    Args:
        training: False distributes the samples of an evaluation among all ranks. Inside the loop, models of
            DistributedOptimizers are set to the consensus of all ranks; no step can be taken.
        split: False: each rank's (replica's) loader already reads different samples. Numbers of batches may differ: a
            rank without batches repeats its last one with weight 0 until all have ended. "dirichlet": give each worker
            a fixed part of the samples, with unequal label frequencies (non-IID data), from `seed`, `alpha` and the
            number of workers; see `hpcdist.data.labels.dirichlet`.
        alpha: of the Dirichlet distribution: with 0.1 a worker has few labels, with 100 all workers are similar.
        labels: with "dirichlet", integer labels of samples; None: the data set's `targets`, `labels` or last tensor.
        optimizers: the distributed optimisers that the loop steps; None: all.

    Raises:
        ConfigError: the loader is not a torch DataLoader, or its sampler splits samples for another library. While
            iterating: the loop would let ranks diverge, or report metrics of one rank only.
        MismatchError: at an epoch's first batch, workers' loaders, or batches in a replica, have different samples.
    """
    if isinstance(loader, ShardedLoader):
        raise rules.error("a loader is sharded twice")
    if split and isinstance(loader, IterableDataset):  # a stream of batches, such as webdataset's WebLoader
        loader = DataLoader(loader, batch_size=None)
    if split and not isinstance(loader, DataLoader):
        raise rules.error("the loader is not torch's", kind=type(loader).__name__)
    if split not in (True, False, "dirichlet"):
        raise rules.error("a split has another name", split=split)
    sharded = ShardedLoader(loader, seed, training, bool(split), optimizers)
    if split == "dirichlet":
        sharded.split_by_label(labels, alpha)
    return sharded


class ShardedLoader(AroundLoader):
    """Iterate over this rank's share of the samples, one epoch per iteration. Created by `shard`.

    Attributes:
        weight: of the last batch: its samples divided by the workers' mean number; 0 for a padding batch.
        workers: the ranks that get batches; `known_workers`: of the last epoch, for `len` without an optimiser.
        next_epoch: the epoch, from 0, of the next iteration. After `hpcdist.load` the unfinished epoch, or the one
            after a finished one.
        batches: the indices of the samples in each batch of this rank in this epoch, if they are known.
    """

    def __init__(
        self, loader: DataLoader[Any], seed: int, training: bool, split: bool,
        optimizers: Sequence[torch.optim.Optimizer] | None,
    ):  # fmt: skip
        self._loader, self._seed, self._training, self._split = loader, seed, training, split
        self._stepped = optimizers
        self._iterable = split and isinstance(loader.dataset, IterableDataset)
        # The epoch; all ranks' samples in it before the first batch to read, and before the next batch; it has ended.
        self._epoch, self._start, self._done, self._ended = -1, 0, 0, True
        self._sampled = -1  # last epoch that `take` has sampled
        self._weight = 1.0
        # Ranks' loaders were compared; the counting of samples was logged; a call inside a step was warned of.
        self._compared = self._counted = self._shares = False
        self.known_workers: tuple[int, ...] = ()
        if split and not self._iterable:
            self._order = sample_order(loader, seed)
            self.batches: list[Any] = []  # the DataLoader keeps the list
            kept: dict[str, Any] = {name: getattr(loader, name) for name in _LOADER_OPTIONS}
            if self._order.single:
                kept |= {"batch_size": None, "sampler": self.batches}
            else:
                kept["batch_sampler"] = self.batches
            self._sharded = DataLoader(loader.dataset, **kept)

    def set_epoch(self, epoch: int, steps: int = 0) -> None:
        """Set the epoch of the next iteration, which begins after this number of its steps."""
        self._epoch = epoch - 1
        self._start = steps * len(self._replicas()) * (self._order.batch_size or 1) if steps else 0

    @property
    def next_epoch(self) -> int:
        return self._epoch + 1

    def __len__(self) -> int:
        """Return the number of steps in an epoch, the same on all ranks, server ranks included."""
        if not self._split or self._iterable:
            return len(self._loader)
        if not (self.known_workers and not self._active_optimizers()):  # else training has ended, or not begun
            self.known_workers = self._replicas()
        return self._steps(self._order.plan(len(self.known_workers)))

    def __iter__(self) -> Iterator[Any]:
        bn_model = _update_bn_model()
        if bn_model is not None and not self._split:
            _require_averaged(bn_model)
        if not self._training and bn_model is None:
            return self._evaluate()
        # Without gradients nothing is trained: in update_bn, or in an evaluation on the training data.
        return self._train() if torch.is_grad_enabled() else self._iterate(self._loader, 0)

    @property
    def weight(self) -> float:
        return self._weight

    @weight.setter
    def weight(self, value: float) -> None:
        raise rules.error("the weight of a batch is set in the loader", value=value)

    @property
    def workers(self) -> tuple[int, ...]:
        return current().ranks_of(self._replicas())

    def _replicas(self) -> tuple[int, ...]:
        """Return the replicas of the model that get batches; ranks, if each rank has a whole model."""
        size = current().outer.size
        if not self._training:
            return tuple(range(size))
        strategies = [optimizer.strategy for optimizer in self._optimizers()]
        choices = {strategy.config.workers(size) for strategy in strategies}
        if len(choices) > 1:
            listed = " and ".join(map(str, sorted(choices)))
            raise rules.error("optimisers of one loop have different workers", ranks=listed)
        return choices.pop()

    def _optimizers(self) -> Sequence[Any]:
        optimizers = self._active_optimizers()
        if not optimizers:
            raise rules.error("the loader is iterated before an optimiser is distributed")
        return optimizers

    def _active_optimizers(self) -> Sequence[Any]:
        """Return the loop's optimisers whose training has not ended."""
        distributed = current().optimizers
        return distributed if self._stepped is None else [o for o in self._stepped if o in distributed]

    def split_by_label(self, labels: Sequence[int] | Tensor | None, alpha: float) -> None:
        """Give each worker a part of the samples by their labels; see `shard`."""
        if self._iterable:
            raise rules.error("a loader with a sampler is split by label")
        self._order.split_by_label(labels_of(self._loader.dataset, labels), alpha, self._seed)

    # --- an epoch of training -------------------------------------------------------------------------------------
    def _train(self) -> Iterator[Any]:
        """Iterate over an epoch's training batches; on a server rank, serve."""
        session, optimizers, workers = current(), self._optimizers(), self._replicas()
        self.known_workers = workers
        self._start_epoch()
        if session.loader is None:  # else inside another loader's loop, which determines the steps
            for optimizer in optimizers:
                start_epoch(optimizer)
            # By all ranks, because there may be only one worker.
            self._compare_loaders(session.comm, session.ranks_of(workers)[0])
            for optimizer in optimizers:  # without the time of an evaluation before this epoch
                optimizer.strategy.records.start()
        if session.outer.rank not in workers:
            yield from period(optimizers, ())
            for optimizer in optimizers:
                optimizer.strategy.model.take_snapshot()
            return
        if session.loader is not None:
            self._ended = True  # whether it ends is up to the other loader
            yield from (weighted.batch for weighted in self._weighted_batches([], workers))
            return
        strategies = [optimizer.strategy for optimizer in optimizers]
        session.loader = self
        if len(workers) < session.outer.size:
            session.group, session.peers = optimizers[0].attachment.workers, optimizers[0].attachment.peers
            session.calls_before = None if session.comm.mpi is None else count_collective_calls()
        epoch, run = Epoch(strategies), session.run
        for strategy in strategies:
            strategy.model.refresh()
            strategy.model.take_snapshot()
            if self._split:  # ranks have different samples
                strategy.gradients.checksums = None
        try:
            weighted = self._weighted_batches(strategies, workers)
            batches = epoch.watch(weighted if run is None else _with_counts(weighted, run, workers))
            yield from period(optimizers, batches, pauses_when_left=True)
            refuse_calls_of_servers(session)  # for calls that ended without a reply
            epoch.check()
            self._ended = True
            if run is not None:
                run.end_epoch(self._epoch + 1)
        finally:
            session.loader = session.group = session.peers = session.calls_before = None
            for strategy in strategies:
                strategy.model.take_snapshot()

    def _start_epoch(self) -> None:
        self._epoch, self._ended = self._epoch + 1, False
        if self._split and not self._iterable:
            self._epoch = self._order.epoch(self._epoch)

    def _weighted_batches(self, strategies: Sequence[Strategy], workers: tuple[int, ...]) -> Iterator[WeightedBatch]:
        """Yield this rank's batches of the epoch; on the first worker `_warn_of_calls` checks weighted ones."""
        worker = workers.index(current().outer.rank)
        reads_locally = not self._split or self._iterable
        for strategy in strategies:
            if strategy.contract.batch == "portions":
                yield from self._joint_batches(strategy, worker, len(workers))
                return
        n = len(workers)
        for weighted in self._local_batches(strategies, worker, n) if reads_locally else self._split_batches(worker, n):
            self._weight = weighted.weight
            watched = [s.model.gradients for s in strategies if s.contract.weights_batches]
            if worker != 0 or weighted.weight == 1.0 or self._shares:
                watched = []
            for gradients in watched:
                gradients.on_begin = partial(self._warn_of_calls, count_collective_calls())
            yield weighted
            for gradients in watched:
                gradients.on_begin = None

    def _loop_sets_weights(self) -> bool:
        return any(optimizer.attachment.sets_weights for optimizer in self._active_optimizers())

    def _warn_of_calls(self, before: Mapping[Any, int]) -> None:
        """Warn once if the loop may divide its loss by a count of all ranks, while hpcdist weights the batches too."""
        if not self._shares and not self._loop_sets_weights() and count_collective_calls() != before:
            self._shares = True
            _log.warning(
                "hpcdist weights the batches of a step by their numbers of samples, and the loop makes a collective "
                "call between a batch and its backward pass. Don't divide the loss by a count summed over ranks "
                "(boxes, tokens): the weight would count twice. Divide it by this rank's count, and call "
                "optimizer.set_batch_weight(count)."
            )

    def _split_batches(self, worker: int, workers: int) -> Iterator[WeightedBatch]:
        """Yield this worker's share of the samples of an epoch."""
        order, plan = self._plan_epoch(worker, workers)
        steps = self._steps(plan)
        self.batches[:] = [order.batch(plan, step, worker) for step in range(steps)]
        resumes, self._start = plan.start > 0, 0
        for step, batch in zip(range(steps), self._iterate(self._sharded, worker, resumes, plan.start), strict=True):
            self._done = plan.position(step + 1)
            yield WeightedBatch(batch, order.weight(plan, step, worker), step == steps - 1, partial(plan.sizes, step))
        self._done = len(order)

    def _joint_batches(self, strategy: Any, worker: int, workers: int) -> Iterator[WeightedBatch]:
        """Yield batches with the samples of all workers, of which a step evaluates this worker's share, for L-BFGS.

        `strategy.joint`, which describes the batch, must be set before it is yielded: the loop's step reads it.
        """
        if not self._split or self._iterable or self._order.batch_size is None:
            raise rules.error("the loader yields whole batches, or reads its own samples")
        order, plan = self._plan_epoch(worker, workers)
        if plan.parts:
            raise rules.error("joint batches are split by label", strategy)
        steps = self._steps(plan)
        joint = [joint_batch(plan, step, worker, strategy.config) for step in range(steps)]
        self.batches[:] = [order.items(positions.tolist()) for positions, _ in joint]
        batches = self._iterate(self._sharded, worker, plan.start > 0, plan.start)
        self._start = 0
        try:
            for step, batch in zip(range(steps), batches, strict=True):
                self._done, strategy.joint = plan.position(step + 1), joint[step][1]
                yield WeightedBatch(batch, ends_epoch=step == steps - 1, counts=partial(plan.sizes, step))
        finally:
            strategy.joint = None
        self._done = len(order)

    def _iterate(self, loader: DataLoader[Any], worker: int, resumes: bool = False, start: int = 0) -> Iterator[Any]:
        """Iterate over a worker's batches; a resumed epoch takes no number from torch's generator.

        The loader's processes use different random numbers for each worker, also if all ranks have one seed; the first
        worker's are those of training on one process.
        """
        grid = current().grid
        if grid is not None and grid.stages > 1:
            yield from identical_batches(loader, grid.inner, (self._seed, self._epoch, worker, start))
            return
        state = torch.get_rng_state()  # the epoch's base seed was taken when the epoch started
        batches = iter(loader) if worker == 0 else iterate_with_worker_seed(loader, worker)
        if resumes:
            torch.set_rng_state(state)
        yield from batches

    def _plan_epoch(self, worker: int, workers: int) -> tuple[Order, EpochPlan]:
        """Return this epoch's order and plan. Collective among the workers if the loader has a sampler."""
        session, order = current(), self._order
        group = session.group or session.comm
        self._compare_loaders(group, 0)
        if not (self._start and self._sampled == self._epoch):  # else continue an epoch that this loader started
            order.take(group)
            self._sampled = self._epoch
        return order, order.plan(workers, self._epoch, self._start)

    def _compare_loaders(self, group: Communicator, first: int) -> None:
        """Collective, once. Check that all ranks of `group` would distribute the same samples; `first` samples them."""
        if not self._compared and self._split and not self._iterable:
            require_same_loader(group, self._order.settings(), self._loader.dataset)
            self._order.require_unsplit_sampler(group, first)
            self._compared = True

    def _steps(self, plan: EpochPlan) -> int:
        return (plan.n_samples - plan.start) // plan.global_batch if self._order.drop_last else plan.steps

    # --- loaders whose ranks read different samples ---------------------------------------------------------------
    def _local_batches(self, strategies: Sequence[Strategy], worker: int, workers: int) -> Iterator[WeightedBatch]:
        """Yield the batches of this rank's loader, then padding batches of weight 0 while other ranks have batches."""
        session = current()
        group = session.peers or session.outer
        batches = self._iterate(self._loader, 0 if self._split else worker)  # identical, if they are to be split
        if self._split and workers > 1:
            first = next(batches, None)
            batches = iter(()) if first is None else chain([first], batches)
            if same_on_all_ranks(group, first):
                batches = islice(batches, worker, None, workers)
        pads = workers > 1 and any(strategy.contract.synchronous for strategy in strategies)
        yield from self._padded(strategies, group, batches) if pads else map(WeightedBatch, batches)

    def _padded(
        self, strategies: Sequence[Strategy], group: Communicator, batches: Iterator[Any]
    ) -> Iterator[WeightedBatch]:
        """Collective in each step, so that no rank may stop earlier. Yield weighted batches until no rank has one."""
        last, step, log_message = None, 0, None
        while True:
            batch = next(batches, None)
            if log_message and not self._counted:  # after a step, in which the loop may have called set_batch_weight
                self._counted = True
                if group.rank == 0 and not self._loop_sets_weights():
                    _log.log(*log_message)
            counts, codes = gather_counts(group, *((0, 0) if batch is None else count_samples(batch)))
            log_message = log_message or counting_message(counts, codes)
            if not counts.any():
                return
            if step == 0 and not counts.all():  # a rank without any batch gets a copy of another rank's
                last = broadcast_in(group, batch, int(counts.argmax()))
            last, step = last if batch is None else batch, step + 1
            yield WeightedBatch(last, relative_weight(counts, group.rank), counts=counts.tolist)

    # --- an evaluation --------------------------------------------------------------------------------------------
    def _evaluate(self) -> Iterator[Any]:
        """Iterate over the batches of an evaluation, with the models set to the consensus."""
        session = current()
        self._start_epoch()
        with consensus_of(session.optimizers):
            worker = session.outer.rank
            if not self._split or self._iterable:
                yield from (weighted.batch for weighted in self._local_batches([], worker, session.outer.size))
                return
            order, plan = self._plan_epoch(worker, session.outer.size)
            steps = [step for step in range(self._steps(plan)) if plan.sizes(step)[worker]]
            self.batches[:] = [order.batch(plan, step, worker) for step in steps]
            yield from self._iterate(self._sharded, worker)

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, in samples of all ranks, to resume on any number of ranks.

        An epoch that was left by `break` continues there once the state is loaded (with no batch if it was left after
        its last one); iterating again without loading starts the next epoch. The state describes the data set, so that
        resuming on other data logs a warning.
        """
        data = fingerprints(self._loader.dataset) if self._samples() else {}
        position = {"epoch": self._epoch, "consumed": self._done, "ended": self._ended}
        return {**position, "samples": self._samples(), "data": data}

    def _samples(self) -> int:
        """Return the number of samples that are distributed in an epoch; 0 if it is unknown."""
        return len(self._order) if self._split and not self._iterable else 0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position: the next iteration continues there, or starts the next epoch after a complete one."""
        n = self._samples()
        if state.get("samples", n) != n:
            _log.warning(
                "data has %d samples here, and %d in the checkpoint: continuing with these data.", n, state["samples"]
            )
        for change in changed_fingerprints(self._loader.dataset, state.get("data", {})) if n else ():
            _log.warning("%s: continuing with these data.", change)
        unfinished = state["consumed"] < n or (n and not state.get("ended", True))
        self._epoch, self._start = (state["epoch"] - 1, state["consumed"]) if unfinished else (state["epoch"], 0)


def _update_bn_model() -> nn.Module | None:
    """Return the model if torch's `update_bn` is iterating the loader for its running statistics; else None."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _UPDATE_BN:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["model"]


def _require_averaged(model: nn.Module) -> None:
    """Raise ConfigError if running statistics would be those of this rank's samples only."""
    session = current()
    averaged = any(optimizer.strategy.model.module is model for optimizer in session.optimizers)
    if session.comm.size > 1 and not averaged:
        raise rules.error("update_bn reads different samples on each rank", model=type(model).__name__)


def _with_counts(batches: Iterable[WeightedBatch], run: LoopRun, workers: tuple[int, ...]) -> Iterator[WeightedBatch]:
    """Count each batch's samples for the run; if other ranks' counts are unknown, they are assumed to be equal."""
    worker = workers.index(current().outer.rank)
    for weighted in batches:
        counts = [count_samples(weighted.batch)[0]] * len(workers) if weighted.counts is None else weighted.counts()
        run.samples += int(counts[worker])
        run.of_all += int(sum(counts))
        yield weighted
