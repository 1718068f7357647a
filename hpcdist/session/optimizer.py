"""Make a torch optimiser distributed: its `step` runs a strategy, such as allreduce or softsync."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn

from hpcdist import strategies
from hpcdist.comm.communicator import Communicator, Trace
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.model.gradients import uncompiled
from hpcdist.model.hyperparameters import Hyperparameters
from hpcdist.parallel.agreement import PartOfModel
from hpcdist.parallel.pipeline import Pipeline
from hpcdist.records import StepRecord
from hpcdist.session import arguments, rules
from hpcdist.session.consistency import compare_first_batches, require_same_state
from hpcdist.session.loader.period import gather_counts, relative_weight
from hpcdist.session.methods import guarded_methods
from hpcdist.session.pipeline import check_optimizer, require_in_stages, share_tied
from hpcdist.session.state import settings_of
from hpcdist.session.sync_batch_norm import synchronise_batch_norms
from hpcdist.session.world import current, require_equal, require_same_files
from hpcdist.strategies import Strategy

Loss = Literal["mean", "sum"]
_SCALED = ("found_inf", "grad_scale")  # set by a GradScaler; the local step would unscale gradients again with them
_MICRO_BATCHES = "the loss of micro-batches is no mean over samples"
Step = TypeVar("Step", bound=Callable[..., Any])


def _keep_unwrapped(step: Step) -> Step:
    """Mark a `step` so that torch doesn't wrap it (hooks would run twice) and doesn't compile it (it communicates)."""
    marked: Any = uncompiled(step)
    marked.hooked = True
    marked._wrapped_by_lr_sched = True  # schedules warn about a step that they have not wrapped to count calls...
    return step


@dataclass
class Attachment:
    """State that a distributed optimiser has in addition to a plain one: `optimizer.attachment`."""

    strategy: Any  # runs the steps
    local_step: Callable[..., Any]  # `step` of the plain optimiser
    local_state_dict: Callable[[], dict[str, Any]]  # `state_dict` of the plain optimiser
    workers: Communicator  # the ranks that take steps
    peers: Communicator  # the workers with this rank's stage of the model; all workers where each has a whole model
    held: list[list[int]]  # ids of each group's parameters
    detects_changes: bool  # the loop must not change parameters between steps: the strategy replaces or sends them
    end_guard: Callable[[], None]  # lets the model run inside DistributedDataParallel again
    record: StepRecord | None = None  # of the last step
    epoch_started: bool = False
    loads: int = 0  # number of calls of `load_state_dict`
    modes: int = 0  # of the steps since the last sync point: bit 1 for training mode, bit 0 for evaluation mode
    others: Sequence[str] = ()  # modules whose mode differed from the model's in the first of these steps
    sets_weights: bool = False  # the loop calls `set_batch_weight`
    uneven: bool = False  # a batch of the last loop over a loader had another weight than 1
    pending: bool = False  # the loop over the loader has ended before the step with its last gradients
    running: bool = False  # a method of the plain optimiser is running
    write: Callable[[StepRecord], None] | None = None  # writes the step's record, where the loop writes a run's files
    compute: Callable[[], object] | None = None  # advances the clock by the time of a step, on virtual ranks
    snapshot: list[int | bytes] | None = None  # the model's `changes` after the last step, with `detects_changes`

    @contextmanager
    def run_local(self) -> Iterator[None]:
        """Let the plain optimiser's code, inside the context, call methods that are refused in loops."""
        outside, self.running = self.running, True
        try:
            yield
        finally:
            self.running = outside

    def take_snapshot(self) -> None:
        """Store the version counters and samples of the parameters, to detect changes by the loop."""
        if self.detects_changes:
            self.snapshot = self.strategy.model.changes()


class _Distributed:
    """A mix-in for an optimiser's class: `step` runs a strategy."""

    attachment: Attachment
    _step_supports_amp_scaling = True  # a GradScaler lets `step` skip updates: all ranks must skip the same ones

    @property
    def strategy(self) -> Any:
        return self.attachment.strategy

    @property
    def record(self) -> StepRecord | None:
        """Return the record of the last step."""
        return self.attachment.record

    @_keep_unwrapped
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step by the strategy. Collective for synchronous strategies.

        With a GradScaler, gradients are unscaled first, and the update is skipped if some of them overflowed.
        """
        attachment = self.attachment
        strategy: Strategy = attachment.strategy
        self._check_step(strategy)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        model, scale = strategy.model, vars(self).get("grad_scale")
        model.refresh()
        if (unfrozen := model.unfrozen) is not None:
            rules.refuse("a frozen layer is unfrozen", strategy, name=unfrozen)
        if changed := model.gradients.changed():
            rules.refuse("gradients are changed between backward() and step()", strategy)
        skips, unscale = "found_inf" in vars(self), None if scale is None else 1.0 / float(scale)
        shares_in_step = strategy.stages is not None and strategy.contract.sends == "between steps"
        step = self._step_and_share if shares_in_step else attachment.local_step
        attachment.record = strategy.step(step, skips=skips, unscale=unscale, changed=changed)
        if attachment.write is not None:
            attachment.write(attachment.record)
        if strategy.stages is not None and not shares_in_step:
            share_tied(model.module)
        attachment.take_snapshot()
        if strategy.gradients.checksums:
            compare_first_batches(self)
        return loss

    def _step_and_share(self) -> None:
        """Take the local step, and copy parameters that stages share, before the strategy sends them."""
        self.attachment.local_step()
        share_tied(self.strategy.model.module)

    def _check_step(self, strategy: Strategy) -> None:
        """Raise ConfigError on a server, and where the step or changes by the loop would be lost."""
        attachment, module = self.attachment, strategy.model.module
        if not strategy.is_worker:
            raise rules.error("a server rank takes a step", rank=strategy.comm.rank)
        if not attachment.modes:
            attachment.others = [name for name, each in module.named_modules() if each.training != module.training]
        attachment.modes |= 1 << module.training
        if torch._C._current_graph_task_id() != -1:  # inside backward()
            rules.refuse("an optimiser steps inside the backward pass", strategy)
        if attachment.compute is not None:
            attachment.compute()
        if strategy.model.is_swapped:
            raise rules.error("a step is taken in an evaluation")
        if attachment.held != [[*map(id, group["params"])] for group in self.param_groups]:  # type: ignore[attr-defined]
            raise rules.error("parameters are put into a group by hand")
        if attachment.uneven and not attachment.pending:
            warnings.warn(
                "A step outside of the loop over hpcdist.shard's loader: batches count equally. Iterate over it, "
                "not over kept batches (list, itertools.cycle); or call optimizer.set_batch_weight(n).", stacklevel=3,
            )  # fmt: skip
        attachment.pending = False
        if attachment.snapshot is not None and strategy.model.changes() != attachment.snapshot:
            strategy.model.refresh()  # raises first if a tensor was replaced and can't be restored
            raise rules.error("parameters are changed between steps", strategy)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the local optimiser's state; raise ConfigError inside the loop if servers have the state."""
        if current().group is not None:
            rules.refuse("the optimiser's state is loaded within an epoch", self.strategy)
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self.attachment.loads += 1

    def set_batch_weight(self, n: float) -> None:
        """Set the weight of this rank's next batch: `n`, the number of samples or tokens that its loss averages over.

        Call it in each step on all workers, before the forward pass. Collective for strategies that average the
        gradients of one step (allreduce, hardsync): the gradient of a rank is scaled by n / (mean n of all workers), so
        that the update is the mean over the samples, or tokens, of all workers. With softsync and ssp, whose workers
        don't wait for each other, n = 0 drops the gradient and other values have no effect. Strategies whose ranks step
        with their local gradients ignore the weight.

        The weight holds until the next batch or the next call. With gradient accumulation each batch is weighted
        separately, and the result is that of one process with the samples of all ranks.

        Messages: an all-reduce of one number per worker.

        Example:
            >>> optimizer = hd.DistributedOptimizer(sgd, model)
            >>> optimizer.set_batch_weight(16 if hd.rank() == 0 else 9)  # this rank's batch has 16, or 9, samples

        Raises:
            ConfigError: n is negative or not finite; gradients add up; or the model runs micro-batches in a pipeline.
        """
        n, model, contract = float(n), self.strategy.model, self.strategy.contract
        if not (math.isfinite(n) and n >= 0):
            raise ConfigError(f"n must be a finite number, at least 0; got {n}. Count what the loss is a mean over.")
        if self.strategy.adds_up:
            raise rules.error("a sum is weighted")
        if isinstance(model.module, Pipeline):
            raise rules.error(_MICRO_BATCHES, found="optimizer.set_batch_weight()")
        peers = self.attachment.peers
        if contract.weights_batches:
            self.attachment.sets_weights, self.attachment.uneven = True, False
        if contract.weights_batches and contract.synchronous:
            model.gradients.set_batch_weight(n, lambda n: relative_weight(gather_counts(peers, n)[0], peers.rank))
        elif contract.weights_batches:
            model.gradients.set_batch_weight(float(n > 0))

    def weigh(self, *_: object) -> None:
        """Refuse the former name of `set_batch_weight`."""
        raise ConfigError(
            "optimizer.weigh must be called by its name now; got a call. Write optimizer.set_batch_weight(n)."
        )

    def synchronize(self) -> None:
        """Average now the gradients that are not averaged yet. Collective where ranks average gradients.

        Raises ConfigError where servers compute the updates from the gradients of several workers.
        """
        rules.refuse("synchronize() is called", self.strategy)
        self.strategy.synchronize()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Do nothing, for loops written for Horovod: `step` never averages a gradient twice."""
        return nullcontext()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally inside the context: for all backward passes of a step but the last one."""
        with self.strategy.no_sync():
            yield

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle or copy the plain optimiser with this rank's state."""
        self._warn_of_parts()
        plain: Any = self
        return object.__new__, (type(self).__bases__[1],), plain.__getstate__()

    def state_dict(self) -> dict[str, Any]:
        """Return the local optimiser's state of this rank; warn if each of several servers has only a part of it."""
        self._warn_of_parts()
        return self.attachment.local_state_dict()

    def _warn_of_parts(self) -> None:
        """Warn if the optimiser's state is divided among several servers."""
        holders = self.strategy.config.optimizer_ranks(self.strategy.comm.size)
        if self.strategy.comm.size > 1 and len(holders) > 1:
            warnings.warn(
                f"The optimiser's state is divided among the servers, ranks {holders}; this is the part of rank "
                f"{self.strategy.comm.rank}. Save all of it by hpcdist.save(..., optimizer=optimizer).",
                stacklevel=3,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, such as those of a layer that is unfrozen later.

        Raises ConfigError if the model lacks one of them, or if servers update the model: they know the first groups.
        """
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        rules.refuse("a group of parameters is added", self.strategy, count=len(params))
        self.strategy.model.add(params)
        optimizer: Any = self  # this class is mixed into that of an optimiser
        super().add_param_group({**param_group, "params": params})  # type: ignore[misc]
        self.strategy.hyperparameters = Hyperparameters(optimizer)
        self.attachment.held = [[*map(id, group["params"])] for group in optimizer.param_groups]


class _ClosureEvaluating(_Distributed):
    """A mix-in for an optimiser whose step evaluates its closure several times, such as L-BFGS."""

    @_keep_unwrapped
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective. Take one step on the batches of all ranks; return what the plain optimiser's step returns.

        L-BFGS returns the loss before the step, averaged over the ranks.
        """
        if closure is None:
            raise rules.error("such an optimiser gets no closure", optimizer=type(self).__name__)
        strategy = self.strategy
        self._check_step(strategy)
        strategy.model.refresh()
        frozen = next((slot.name for slot in strategy.model.slots if not slot.tensor.requires_grad), None)
        if frozen is not None:
            rules.refuse("a layer is frozen later", strategy, name=frozen)
        attachment = self.attachment
        attachment.record, loss = strategy.minimise(attachment.local_step, closure)
        if attachment.write is not None:
            attachment.write(attachment.record)
        compare_first_batches(self)
        return loss


class _Methods(_Distributed, torch.optim.Optimizer):
    """Lists the methods that every optimiser has."""


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module | None = None,
    strategy: str | None = None,
    *,
    clip_norm: float | None = None,
    bucket_bytes: int = 25 << 20,
    loss: Loss = "mean",
    buffers: Mapping[str, Literal["mean", "first", "own"]] | None = None,
    identical_batches: Literal["warn", "allow"] = "warn",
    **options: Any,
) -> torch.optim.Optimizer:
    """Collective. Let `optimizer` train `model` on all ranks by a strategy; change it in place and return it.

    The model must be on its device. Its parameters move into flat memory and get rank 0's values. Further parameters of
    the optimiser, such as a loss function's, are trained too. Several optimisers may each train a part of one model.
    Learning-rate schedules and `state_dict` work as before. An optimiser that needs a closure, such as LBFGS, may
    evaluate it several times; gradients and loss are averaged over the ranks each time. torch's SyncBatchNorm layers
    are replaced by `hpcdist.SyncBatchNorm`.

    For a model in stages (`hpcdist.pipeline`) pass `model.parameters()`, this rank's stage, to the optimiser. It
    trains the stage with the same stages of the other replicas, and `model.step` calls its `step`. Gradients that are
    not finite in one stage count as not finite in all stages of the replica.

    Example:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, strategy="gossip_pull", clip_norm=1.0)

    Args:
        strategy: a name of `hpcdist.strategies.available()`, or `path/to/file.py:Class`. None: allreduce, or the
            strategy that `hpcdist compare` or `sweep` has set for this run.
        clip_norm: maximum 2-norm of all gradients. With allreduce and hardsync (with several servers too) the mean
            gradient of the update is clipped; else each rank's local gradient, before it is sent or used. For a model
            in stages the norm is taken over all stages.
        bucket_bytes: gradients are reduced in buckets of about this size.
        loss: how the loss of a batch is reduced: "mean" or "sum" over its samples. With "sum", strategies add gradients
            over the workers instead of averaging them. Strategies whose ranks step locally, or whose servers update
            with each gradient, use the sum over the rank's batch.
        buffers: how buffers that change are synchronized, by name or pattern (`"head.*"`): "mean" of the workers;
            "first": the first worker's values on all ranks, as with DistributedDataParallel; "own": local on each rank
            during training. Default: "mean" for the running statistics of torch's normalisation layers, else "first".
        identical_batches: what to do if the first gradients of all workers are bitwise identical, as in a loop without
            `shard` and with one seed: "warn", or "allow" (do nothing).
        options: options of the strategy: see its Config, or `hpcdist strategies`.

    Raises:
        ConfigError: an option is unknown or out of range; or the optimiser needs a closure, and the strategy does not
            support closures (allreduce does, without clipping and without skipped steps).
        MismatchError: ranks differ in strategy, options, optimiser or model, or in a plug-in's file.
    """
    session = current()
    if session.planned is not None:
        strategy, options = session.planned.chosen(strategy, options)
    strategy = strategy or "allreduce"
    arguments.refuse_foreign_names(options)
    if isinstance(optimizer, _Distributed):
        raise rules.error("an optimiser is distributed twice")
    model = arguments.checked_model(optimizer, model, clip_norm)
    require_in_stages(session, model)
    outer, stages = session.outer, session.stages
    if outer.size > 1:
        arguments.require_no_max_norm(model)
    cls = strategies.load(strategy)
    config = cls.Config.from_mapping(options, "strategy")
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    arguments.require_known(loss=(loss, get_args(Loss)), identical_batches=(identical_batches, ("warn", "allow")))
    if loss == "sum":
        rules.refuse("the loss is a sum", cls)
        if isinstance(model, Pipeline):
            raise rules.error(_MICRO_BATCHES, found="loss='sum'")
    settings: dict[str, Any] = {
        "strategy": strategy, "options": config.model_dump(), "optimizer": type(optimizer).__name__, "loss": loss,
        "identical_batches": identical_batches, "buffers": buffers, "clip_norm": clip_norm,
    }  # fmt: skip
    require_equal(session.comm, settings | ({"groups": groups} if stages == 1 else {}), "strategy and optimiser")
    require_same_files(session.comm)  # a strategy in a file, its compressor
    require_same_state(optimizer, outer, cls)
    if stages > 1:  # each stage may have different groups
        ranks_of_stage = range(session.comm.rank % stages, session.comm.size, stages)
        require_equal(outer, {"groups": groups}, "param_groups of a stage", ranks_of_stage)
    evaluates_closure = arguments.requires_closure(optimizer)
    if evaluates_closure:
        arguments.check_closure_settings(type(optimizer).__name__, strategy, cls, config, clip_norm)
    if stages > 1:
        check_optimizer(optimizer, model, evaluates_closure, cls)
    flat = _flat(optimizer, model, bucket_bytes, buffers, session.optimizers)
    worker_replicas = config.workers(outer.size)
    if isinstance(model, Pipeline) and model.routing is not None and len(worker_replicas) < outer.size:
        raise rules.error("micro-batches go to other replicas", cls)
    worker_ranks = session.ranks_of(worker_replicas)
    if session.called_is_main and worker_ranks[0] != 0:
        raise rules.error("is_main() is called before rank 0 becomes a server", cls, worker=worker_ranks[0])
    peers = _split_off(outer, worker_replicas)
    workers = peers if stages == 1 else _split_off(session.comm, worker_ranks)
    weights_batches = config.narrow(cls.contract, outer.size).weights_batches
    synchronise_batch_norms(flat, cls, peers, weights_batches=weights_batches)
    local_class = type(optimizer)
    local_step = _local_step(optimizer, flat, session.comm.trace)
    vars(optimizer).pop("step", None)  # set by a learning-rate schedule; it would bypass the distributed `step`
    agreement = model.agreement if isinstance(model, PartOfModel) else None
    instance = cls(config, outer.split(0), flat, optimizer=optimizer, clip_norm=clip_norm, loss=loss, stages=agreement)
    if not hasattr(instance, "steps"):
        raise ConfigError(
            f"__init__ of {cls.__name__} must call that of Strategy; got a strategy without state. Write "
            "super().__init__(config, comm, model, **options) as its first line."
        )
    require_same_files(session.comm)  # again, for files loaded since: a topology
    instance.gradients.checksums = [] if peers.size > 1 and identical_batches == "warn" else None
    flat.gradients.watch()
    flat.take_snapshot()
    mixin = _ClosureEvaluating if evaluates_closure or cls.contract.batch == "portions" else _Distributed
    distributed: Any = optimizer  # gets a class created here, unknown to type checkers
    distributed.__class__ = type(local_class.__name__, (mixin, local_class), guarded_methods(local_class, _Methods))
    local_state_dict = local_class.state_dict.__get__(optimizer)
    detects = rules.forbids("parameters are changed between steps", instance)
    guard = arguments.guard_against_ddp(model)
    held = [[*map(id, group["params"])] for group in optimizer.param_groups]
    distributed.attachment = Attachment(instance, local_step, local_state_dict, workers, peers, held, detects, guard)
    distributed._opt_called = True  # ... and warn if they step before the optimiser; on a server rank it never steps
    session.optimizers.append(optimizer)
    session.serves, session.workers = session.serves or not instance.is_worker, worker_ranks
    if isinstance(model, PartOfModel):
        model.optimizers.append(distributed)
    if session.run is not None and session.run.start(distributed, worker_ranks, settings_of(distributed), stages):
        distributed.attachment.write = session.run.write
        if session.planned is not None:  # on virtual ranks; no effect on real ones
            distributed.attachment.compute = session.comm.compute
    return optimizer


def _local_step(optimizer: Any, flat: FlatModel, trace: Trace) -> Callable[..., Any]:
    """Return the optimiser's step, followed by copying parameters that it replaced (`p.data = ...`) to flat memory."""
    step = type(optimizer).step.__get__(optimizer)

    @functools.wraps(step)
    def local_step(*args: Any) -> Any:
        scaled = {name: vars(optimizer).pop(name) for name in _SCALED if name in vars(optimizer)}
        try:
            with trace.span("update", "compute"):
                with optimizer.attachment.run_local():
                    result = step(*args)
                flat.refresh()
        finally:
            vars(optimizer).update(scaled)  # the scaler removes them
        return result

    return local_step


def release(optimizer: Any) -> None:
    """Collective. Make a DistributedOptimizer a plain optimiser again, which trains only this rank's model."""
    strategy, model = optimizer.strategy, optimizer.strategy.model.module
    strategy.close()
    strategy.comm.close()
    strategy.model.close()
    if isinstance(model, PartOfModel):
        model.optimizers.remove(optimizer)
    optimizer.attachment.end_guard()
    optimizer.__class__ = type(optimizer).__bases__[1]
    del optimizer.attachment


def _split_off(comm: Communicator, ranks: tuple[int, ...]) -> Communicator:
    """Collective. Return a communicator of `ranks`; on all other ranks one of those."""
    return comm if len(ranks) == comm.size else comm.split(0 if comm.rank in ranks else 1)


def _flat(
    optimizer: torch.optim.Optimizer, model: nn.Module, bucket_bytes: int, buffers: Any, others: list[Any]
) -> FlatModel:
    """Move the optimiser's parameters to flat memory, for a model's first optimiser also the frozen and buffers."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names = {id(p): name for name, p in model.named_parameters()}
    for other in others:
        taken = {id(slot.tensor) for slot in other.strategy.model.slots}
        shared_name = next((names.get(id(p), "a parameter") for p in params if id(p) in taken), None)
        if shared_name is not None:
            raise rules.error("two optimisers have one parameter", name=shared_name)
    outside = [(f"optimizer parameter {i}", p) for i, p in enumerate(params) if id(p) not in names]
    is_first = all(other.strategy.model.module is not model for other in others)
    given = {"extra": outside, "only": params, "buffers": buffers, "rest": is_first, "watched": False}
    return FlatModel(model, bucket_bytes=bucket_bytes, **given)
