"""Share the user's DataLoader among workers, each sample on one only."""

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
from hpcdist.model.gradients import Gradients
from hpcdist.session import rules
from hpcdist.session.consensus import consensus_of
from hpcdist.session.consistency import changed_marks, marks, require_same_loader, start_epoch
from hpcdist.session.loader.batches import counted_as, same_everywhere, samples_in
from hpcdist.session.loader.epoch import Epoch
from hpcdist.session.loader.period import WeightedBatch, counts_of, joint_batch, period, relative
from hpcdist.session.loader.sampling import Order, identical_batches, iter_apart, order_of
from hpcdist.session.run import LoopRun
from hpcdist.session.values import broadcast_in
from hpcdist.session.world import current, refuse_calls_of_servers, shared_calls
from hpcdist.strategies import Strategy

_log = logging.getLogger("hpcdist")
_UPDATE_BN = inspect.unwrap(update_bn).__code__  # it is wrapped in torch.no_grad()

_KEPT = (
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
    """Give this rank its share of `loader`: every sample exactly once per epoch, on whatever number of ranks.

    `loader.batch_size` becomes the batch of each worker. A shuffling loader is shuffled by (seed, epoch), the same on
    all ranks, and a DistributedSampler is replaced; any other sampler, or batch sampler, draws on the first worker, and
    all ranks use its order. All workers get a batch in every step. In the last one, which may have fewer samples,
    gradients are weighted by sample counts; a worker for which none is left gets other samples, which weigh 0: its body
    runs, and its gradients count for nothing.

    An iterable data set that gives all ranks the same batches is shared batch by batch; one that gives each rank
    batches of its own is read to its end on every rank. An iterable data set of whole batches may be passed in place of
    a loader.

    With sandblaster every worker gets the joint batch of all workers. `hpcdist` calls the closure of `optimizer.step`
    with the slice of the batch that this worker computes.

    On a rank that only serves, iterating yields nothing and serves until the workers end the epoch.

    Iterated without gradients (inside `torch.no_grad()`) it is the plain loader: every rank gets all samples, and no
    epoch passes. So it is for `torch.optim.swa_utils.update_bn`, with `training=False` too.

    Where ranks hold stages of a model (`hpcdist.pipeline`) replicas take the place of ranks: all ranks of a replica get
    the same batches. Random numbers that are drawn while a batch is loaded follow from `seed`, the epoch and the
    replica there (of an iterable data set that is split: `seed` and the epoch), and the ranks of a replica compare
    their first batch of each epoch.

    Args:
        training: False shares the samples of an evaluation among all ranks, and involves no step. Inside the loop,
            models that DistributedOptimizers train are the consensus of all ranks.
        split: False says that each rank's loader (each replica's) reads samples of its own already. They may have
            different numbers of batches: one that has none left goes on with one that weighs 0 until all have ended.
            "dirichlet" gives each worker a part of the samples, in all epochs the same one, in which some labels are
            more frequent than in others: to study data that differ. See `hpcdist.data.labels.dirichlet`. It follows
            from `seed`, `alpha` and the number of workers.
        alpha: of the Dirichlet distribution: with 0.1 a worker has few labels, with 100 all as all others.
        labels: with "dirichlet" the samples' labels, integers; None takes the data set's `targets`, `labels` or last
            tensor.
        optimizers: distributed optimisers that the loop steps; all that there are, if None.

    Raises:
        ConfigError: the loader is no DataLoader of torch's, or its sampler splits samples for another library. While it
            is iterated: the loop does what would make ranks differ, or would report figures of one rank alone.
        MismatchError: at the first batch of an epoch, workers' loaders have different samples, or the ranks of a
            replica have read different ones.
    """
    if isinstance(loader, ShardedLoader):
        raise rules.error("a loader is sharded twice")
    if split and isinstance(loader, IterableDataset):  # a stream of batches, as webdataset's WebLoader
        loader = DataLoader(loader, batch_size=None)
    if split and not isinstance(loader, DataLoader):
        raise rules.error("the loader is none of torch's", kind=type(loader).__name__)
    if split not in (True, False, "dirichlet"):
        raise rules.error("a split has another name", split=split)
    sharded = ShardedLoader(loader, seed, training, bool(split), optimizers)
    if split == "dirichlet":
        sharded.split_by_label(labels, alpha)
    return sharded


class ShardedLoader:
    """Iterate over this rank's share, an epoch at a time. `set_epoch` goes to another one.

    Attributes:
        weight: of the batch that was yielded last: its samples over the workers' mean number; 0 for one that does not
            count.
        workers: the ranks that get batches.
        next_epoch: the epoch, from 0, of the next iteration. After `hpcdist.load` it is the epoch that goes on, or the
            one behind it where no sample was left.
        batches: the indices of the samples in each batch of this rank in this epoch, where samples are dealt out.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        seed: int,
        training: bool,
        split: bool,
        optimizers: Sequence[torch.optim.Optimizer] | None,
    ):
        self._loader, self._seed, self._training, self._split = loader, seed, training, split
        self._given = optimizers
        self._iterable = split and isinstance(loader.dataset, IterableDataset)
        self._epoch, self._start, self._done, self._ended = -1, 0, 0, True
        self._drawn = -1  # epoch whose order a sampler has drawn last
        self._weight = 1.0
        self._compared = self._told = self._shares = False
        # The replicas that got batches last, for the length once training has ended.
        self._dealt_to: tuple[int, ...] = ()
        if split and not self._iterable:
            self._order = order_of(loader, seed)
            self.batches: list[Any] = []  # the DataLoader keeps the list
            kept: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT}
            if self._order.single:
                kept |= {"batch_size": None, "sampler": self.batches}
            else:
                kept["batch_sampler"] = self.batches
            self._sharded = DataLoader(loader.dataset, **kept)

    def __getattr__(self, name: str) -> Any:
        """Return what the plain loader has by this name, such as its `dataset`, `batch_size` or `sampler`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._epoch, self._start = epoch - 1, 0

    @property
    def next_epoch(self) -> int:
        return self._epoch + 1

    def __len__(self) -> int:
        """Count the steps in an epoch: each worker's batches, the same on all ranks, those that only serve included."""
        if not self._split or self._iterable:
            return len(self._loader)
        if not (self._dealt_to and not self._training_ones()):  # else training has ended
            self._dealt_to = self._replicas()
        return self._steps(self._order.plan(len(self._dealt_to)))

    def __iter__(self) -> Iterator[Any]:
        refreshed = _refreshed()
        if refreshed is not None and not self._split:
            _require_averaged(refreshed)
        if not self._training and refreshed is None:
            return self._evaluate()
        # Nothing is trained without gradients: not in update_bn, nor where a loop evaluates on its training data.
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
        """Return the replicas of the model that get batches: ranks, where each has a whole one."""
        size = current().outer.size
        if not self._training:
            return tuple(range(size))
        strategies = [optimizer.strategy for optimizer in self._optimizers()]
        ranks = {strategy.config.workers(size) for strategy in strategies}
        if len(ranks) > 1:
            listed = " and ".join(map(str, sorted(ranks)))
            raise rules.error("optimisers of one loop have different workers", ranks=listed)
        return ranks.pop()

    def _optimizers(self) -> Sequence[Any]:
        optimizers = self._training_ones()
        if not optimizers:
            raise rules.error("the loader is iterated before an optimiser is distributed")
        return optimizers

    def _training_ones(self) -> Sequence[Any]:
        """Return the optimisers that the loop steps and that are not finished."""
        distributed = current().optimizers
        return distributed if self._given is None else [o for o in self._given if o in distributed]

    def split_by_label(self, labels: Sequence[int] | Tensor | None, alpha: float) -> None:
        """Give each worker a part of the samples, by their labels; see `shard`."""
        if self._iterable:
            raise rules.error("a sampler draws what is split by label")
        self._order.split_by_label(labels_of(self._loader.dataset, labels), alpha, self._seed)

    # --- an epoch of training -------------------------------------------------------------------------------------
    def _train(self) -> Iterator[Any]:
        session, optimizers, workers = current(), self._optimizers(), self._replicas()
        self._dealt_to = workers
        self._start_epoch()
        if session.loader is None:  # else beside another loader, which says when steps are taken
            for optimizer in optimizers:
                start_epoch(optimizer)
            self._compare(session.comm, session.ranks_of(workers)[0])  # with ranks that serve: one worker may be alone
        if session.outer.rank not in workers:
            yield from period(optimizers, ())
            for optimizer in optimizers:
                optimizer.strategy.model.mark()
            return
        if session.loader is not None:
            self._ended = True  # whether it is iterated to its end is up to the other loader
            yield from (weighted.batch for weighted in self._weighted([], workers))
            return
        strategies = [optimizer.strategy for optimizer in optimizers]
        session.loader = self
        if len(workers) < session.outer.size:
            session.group, session.peers = optimizers[0].attachment.workers, optimizers[0].attachment.peers
            session.calls_before = None if session.comm.mpi is None else shared_calls()
        epoch, run = Epoch(strategies), session.run
        if run is not None:
            strategies[0].records.start()  # an evaluation before this epoch is none of its steps
        for strategy in strategies:
            strategy.model.refresh()
            strategy.model.mark()
            if self._split:  # no rank has another's samples
                strategy.gradients.checksums = None
        try:
            weighted = self._weighted(strategies, workers)
            batches = epoch.watch(weighted if run is None else _counted(weighted, run, workers))
            yield from period(optimizers, batches, pauses_when_left=True)
            refuse_calls_of_servers(session)  # that have ended all the same, and had no answer
            epoch.check()
            self._ended = True
            if run is not None:
                run.end_epoch(self._epoch + 1)
        finally:
            session.loader = session.group = session.peers = session.calls_before = None
            for strategy in strategies:
                strategy.model.mark()

    def _start_epoch(self) -> None:
        self._epoch, self._ended = self._epoch + 1, False
        if self._split and not self._iterable:
            self._epoch = self._order.epoch(self._epoch)

    def _weighted(self, strategies: Sequence[Strategy], workers: tuple[int, ...]) -> Iterator[WeightedBatch]:
        """Draw this rank's batches of the epoch."""
        worker = workers.index(current().outer.rank)
        own = not self._split or self._iterable
        for strategy in strategies:
            if strategy.contract.batch == "portions":
                yield from self._joint(strategy, worker, len(workers))
                return
        for weighted in self._own(strategies, worker, len(workers)) if own else self._dealt(worker, len(workers)):
            self._weight = weighted.weight
            watched = [strategy.model.gradients for strategy in strategies if worker == 0 and weighted.weight != 1.0]
            for gradients in watched:
                gradients.on_begin = partial(self._look_at_calls, gradients, shared_calls())
            yield weighted
            for gradients in watched:
                gradients.on_begin = None

    def _look_at_calls(self, gradients: Gradients, before: Mapping[Any, int]) -> None:
        """Say once that a loss may be weighed twice: by its batch's samples, and by a count of all ranks."""
        if (
            gradients.weights_batches
            and not gradients.weighted_by_loop
            and not self._shares
            and shared_calls() != before
        ):
            self._shares = True
            _log.warning(
                "Batches of a step weigh by their numbers of samples, and the loop calls all ranks between a batch and "
                "its backward pass. A loss must not be divided by a count that ranks have added up (boxes, tokens): it "
                "would be counted twice. Divide it by this rank's own count, and call "
                "optimizer.set_batch_weight(count)."
            )

    def _dealt(self, worker: int, workers: int) -> Iterator[WeightedBatch]:
        """Draw this worker's share of the samples of all."""
        order, plan = self._draw(worker, workers)
        steps = self._steps(plan)
        self.batches[:] = [order.batch(plan, step, worker) for step in range(steps)]
        resumes, self._start = plan.start > 0, 0
        for step, batch in zip(range(steps), self._iterate(self._sharded, worker, resumes, plan.start), strict=True):
            self._done = plan.position(step + 1)
            yield WeightedBatch(batch, order.weight(plan, step, worker), step == steps - 1, partial(plan.sizes, step))
        self._done = len(order)

    def _joint(self, strategy: Any, worker: int, workers: int) -> Iterator[WeightedBatch]:
        """Draw the joint batches of all workers, for a strategy that evaluates portions of them."""
        if not self._split or self._iterable or self._order.batch_size is None:
            raise rules.error("the loader draws batches, or reads its own samples")
        order, plan = self._draw(worker, workers)
        if plan.parts:
            raise rules.error("joint batches are split by label", strategy)
        steps = self._steps(plan)
        found = [joint_batch(plan, step, worker, strategy.config) for step in range(steps)]
        self.batches[:] = [order.items(positions.tolist()) for positions, _ in found]
        batches = self._iterate(self._sharded, worker, plan.start > 0, plan.start)
        self._start = 0
        try:
            for step, batch in zip(range(steps), batches, strict=True):
                self._done, strategy.joint = plan.position(step + 1), found[step][1]
                yield WeightedBatch(batch, ends_epoch=step == steps - 1, counts=partial(plan.sizes, step))
        finally:
            strategy.joint = None
        self._done = len(order)

    def _iterate(self, loader: DataLoader[Any], worker: int, resumes: bool = False, start: int = 0) -> Iterator[Any]:
        """Iterate over a worker's batches; a resumed epoch draws no random number.

        The loader's processes draw other numbers for each worker, though all ranks may have one seed; those of the
        first worker are those of one process.
        """
        grid = current().grid
        if grid is not None and grid.stages > 1:
            yield from identical_batches(loader, grid.inner, (self._seed, self._epoch, worker, start))
            return
        state = torch.get_rng_state()  # the number that torch draws for each epoch was drawn when this one began
        batches = iter(loader) if worker == 0 else iter_apart(loader, worker)
        if resumes:
            torch.set_rng_state(state)
        yield from batches

    def _draw(self, worker: int, workers: int) -> tuple[Order, EpochPlan]:
        """Collective among the workers for samplers of their own. Draw this epoch's order, and share it out."""
        session, order = current(), self._order
        group = session.group or session.comm
        self._compare(group, 0)
        if not (self._start and self._drawn == self._epoch):  # else an epoch goes on that this loader has begun
            order.take(group)
            self._drawn = self._epoch
        return order, order.plan(workers, self._epoch, self._start)

    def _compare(self, group: Communicator, first: int) -> None:
        """Collective, once. Check that all ranks of `group` would deal out the same samples; `first` draws them."""
        if not self._compared and self._split and not self._iterable:
            require_same_loader(group, self._order.settings(), self._loader.dataset)
            self._order.require_joint(group, first)
            self._compared = True

    def _steps(self, plan: EpochPlan) -> int:
        return (plan.n_samples - plan.start) // plan.global_batch if self._order.drop_last else plan.steps

    # --- loaders whose ranks read different samples ---------------------------------------------------------------
    def _own(self, strategies: Sequence[Strategy], worker: int, workers: int) -> Iterator[WeightedBatch]:
        """Draw the batches of this rank's own loader, and then, while other ranks have some, one that weighs 0."""
        session = current()
        group = session.peers or session.outer
        batches = self._iterate(self._loader, 0 if self._split else worker)  # all replicas' may have to be the same
        if self._split and workers > 1:
            first = next(batches, None)
            batches = iter(()) if first is None else chain([first], batches)
            if same_everywhere(group, first):
                batches = islice(batches, worker, None, workers)
        joined = workers > 1 and any(strategy.contract.synchronous for strategy in strategies)
        yield from self._joined(strategies, group, batches) if joined else map(WeightedBatch, batches)

    def _joined(
        self, strategies: Sequence[Strategy], group: Communicator, batches: Iterator[Any]
    ) -> Iterator[WeightedBatch]:
        """Collective. Draw batches until no rank has one, each weighted by its samples."""
        last, step, counted = None, 0, None
        while True:
            batch = next(batches, None)
            if counted and not self._told:  # after a step, in which the loop may have said what its batches weigh
                self._told = True
                if group.rank == 0 and not any(strategy.model.gradients.weighted_by_loop for strategy in strategies):
                    _log.log(*counted)
            counts, shapes = counts_of(group, *((0, 0) if batch is None else samples_in(batch)))
            counted = counted or counted_as(counts, shapes)
            if not counts.any():
                return
            if step == 0 and not counts.all():  # a rank that has none at all goes along with another one's
                last = broadcast_in(group, batch, int(counts.argmax()))
            last, step = last if batch is None else batch, step + 1
            yield WeightedBatch(last, relative(counts, group.rank), counts=counts.tolist)

    # --- an evaluation --------------------------------------------------------------------------------------------
    def _evaluate(self) -> Iterator[Any]:
        session = current()
        self._start_epoch()
        with consensus_of(session.optimizers):
            worker = session.outer.rank
            if not self._split or self._iterable:
                yield from (weighted.batch for weighted in self._own([], worker, session.outer.size))
                return
            order, plan = self._draw(worker, session.outer.size)
            counted = [step for step in range(self._steps(plan)) if plan.sizes(step)[worker]]
            self.batches[:] = [order.batch(plan, step, worker) for step in counted]
            yield from self._iterate(self._sharded, worker)

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, in samples of all ranks, for a loop that is resumed on any number of them.

        An epoch that was left early, by `break`, goes on there once it is loaded, with no batch where it was left
        after its last one; a further iteration without loading begins the next one. Marks of the data set are in it,
        too: a loop that is resumed on other data says so.
        """
        data = marks(self._loader.dataset) if self._samples() else {}
        position = {"epoch": self._epoch, "consumed": self._done, "ended": self._ended}
        return {**position, "samples": self._samples(), "data": data}

    def _samples(self) -> int:
        """Return the number of samples that are dealt out in an epoch; 0 where nobody knows it."""
        return len(self._order) if self._split and not self._iterable else 0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position, for the next iteration to go on from; from an epoch's end with the next epoch."""
        own = self._samples()
        if state.get("samples", own) != own:
            _log.warning("data has %d samples here, and %d in the checkpoint: this run's go on.", own, state["samples"])
        for change in changed_marks(self._loader.dataset, state.get("data", {})) if own else ():
            _log.warning("%s: this run's data go on.", change)
        left = state["consumed"] < own or (own and not state.get("ended", True))
        self._epoch, self._start = (state["epoch"] - 1, state["consumed"]) if left else (state["epoch"], 0)


def _refreshed() -> nn.Module | None:
    """Return the model for whose running statistics torch's `update_bn` iterates, if it does."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _UPDATE_BN:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["model"]


def _require_averaged(model: nn.Module) -> None:
    """Raise ConfigError where running statistics would stay those of this rank's own samples."""
    session = current()
    averaged = any(optimizer.strategy.model.module is model for optimizer in session.optimizers)
    if session.comm.size > 1 and not averaged:
        raise rules.error("update_bn reads samples of each rank's own", model=type(model).__name__)


def _counted(batches: Iterable[WeightedBatch], run: LoopRun, workers: tuple[int, ...]) -> Iterator[WeightedBatch]:
    """Tell the run how many samples each batch has; others' are taken to be as many where each rank reads its own."""
    worker = workers.index(current().outer.rank)
    for weighted in batches:
        counts = [samples_in(weighted.batch)[0]] * len(workers) if weighted.counts is None else weighted.counts()
        run.samples += int(counts[worker])
        run.of_all += int(sum(counts))
        yield weighted
