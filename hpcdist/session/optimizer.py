"""Distribute a torch optimiser: its steps become a strategy's."""

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
from hpcdist.session import rules
from hpcdist.session.arguments import (
    check_evaluating,
    checked_model,
    guard_against_ddp,
    must_have_closure,
    require_known,
    require_no_norms,
    require_own_names,
)
from hpcdist.session.consistency import compare_first_batches, require_same_state
from hpcdist.session.loader.period import counts_of, relative
from hpcdist.session.methods import guarded_methods
from hpcdist.session.pipeline import check_optimizer, require_in_stages, share_tied
from hpcdist.session.state import settings_of
from hpcdist.session.sync_batch_norm import synchronise_batch_norms
from hpcdist.session.world import current, require_equal, require_same_files
from hpcdist.strategies import Strategy

Loss = Literal["mean", "sum"]
_SCALED = ("found_inf", "grad_scale")  # by which a GradScaler's optimiser would unscale gradients again
_MICRO_BATCHES = "the loss of micro-batches is no mean over samples"
Step = TypeVar("Step", bound=Callable[..., Any])


def _as_it_is(step: Step) -> Step:
    """Keep torch from wrapping a `step` whose local step it has wrapped already: hooks would run twice.

    And from compiling it: it communicates.
    """
    marked: Any = uncompiled(step)
    marked.hooked = True
    marked._wrapped_by_lr_sched = True  # schedules warn where a step doesn't look like one that they count...
    return step


@dataclass
class Attachment:
    """All that a distributed optimiser has beside a plain one, under one name: `optimizer.attachment`."""

    strategy: Any  # takes the steps; perhaps one that supports closures
    local_step: Callable[..., Any]  # the optimiser's own
    local_state_dict: Callable[[], dict[str, Any]]  # the optimiser's own
    workers: Communicator  # the ranks that take steps
    peers: Communicator  # the workers with this rank's stage of the model; all workers where each has a whole model
    counts: list[int]  # number of parameters in each group
    looks: bool  # parameters are replaced in steps, or sent between them: the loop must not change them there
    end_guard: Callable[[], None]  # lets the model run inside DistributedDataParallel again
    record: StepRecord | None = None  # of the last step
    epoch_started: bool = False  # an epoch has begun
    loads: int = 0  # how often the loop has loaded the optimiser's state
    modes: int = 0  # of the steps since ranks met last: bit 1 for training mode, bit 0 for evaluation mode
    others: Sequence[str] = ()  # modules that were not in the model's mode at the first of these steps
    running: bool = False  # the optimiser's own step, or another method of its own, is running
    write: Callable[[StepRecord], None] | None = None  # takes the records of a loop that is a run
    compute: Callable[[], object] | None = None  # lets a step's time go by, for a script on virtual ranks
    seen: list[int | bytes] | None = None  # the model's `changes` after the last step, where it `looks`

    @contextmanager
    def run_own(self) -> Iterator[None]:
        """Let the optimiser's own code, inside the context, call its methods as it likes."""
        outside, self.running = self.running, True
        try:
            yield
        finally:
            self.running = outside

    def look(self) -> None:
        """Remember counts of changes and some values of the parameters, where the loop must not change them."""
        if self.looks:
            self.seen = self.strategy.model.changes()


class _Distributed:
    """A mix-in for an optimiser's class: its steps are a strategy's."""

    attachment: Attachment
    _step_supports_amp_scaling = True  # torch's GradScaler leaves it to `step` to skip, which ranks must do together

    @property
    def strategy(self) -> Any:
        return self.attachment.strategy

    @property
    def record(self) -> StepRecord | None:
        """Return the record of the last step."""
        return self.attachment.record

    @_as_it_is
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step by the strategy. Collective for synchronous strategies.

        Called by a GradScaler it unscales gradients, and leaves the update out where some have overflowed.
        """
        own = self.attachment
        strategy: Strategy = own.strategy
        self._require_own_step(strategy)
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
        at_once = strategy.stages is not None and strategy.contract.sends == "between steps"
        step = self._step_and_share if at_once else own.local_step
        own.record = strategy.step(step, skips=skips, unscale=unscale, changed=changed)
        if own.write is not None:
            own.write(own.record)
        if strategy.stages is not None and not at_once:
            share_tied(model.module)
        if own.looks:
            own.look()
        if strategy.gradients.checksums:
            compare_first_batches(self)
        return loss

    def _step_and_share(self) -> None:
        self.attachment.local_step()
        share_tied(self.strategy.model.module)

    def _require_own_step(self, strategy: Strategy) -> None:
        """Raise ConfigError on a server, and where a step would be lost, or would lose the loop's changes."""
        own, module = self.attachment, strategy.model.module
        if not strategy.is_worker:
            raise rules.error("a rank that serves takes a step", rank=strategy.comm.rank)
        if not own.modes:
            own.others = [name for name, each in module.named_modules() if each.training != module.training]
        own.modes |= 1 << module.training
        if torch._C._current_graph_task_id() != -1:
            rules.refuse("an optimiser steps inside the backward pass", strategy)
        if own.compute is not None:
            own.compute()
        if strategy.model.is_swapped:
            raise rules.error("a step is taken in an evaluation")
        if own.counts != [len(group["params"]) for group in self.param_groups]:  # type: ignore[attr-defined]
            raise rules.error("parameters are put into a group by hand")
        if own.seen is not None and strategy.model.changes() != own.seen:
            strategy.model.refresh()  # says so of one that can't be taken back
            raise rules.error("parameters are changed between steps", strategy)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the local optimiser's state; raise ConfigError inside of the loop where servers have the state."""
        if current().group is not None:
            rules.refuse("the optimiser's state is loaded within an epoch", self.strategy)
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self.attachment.loads += 1

    def set_batch_weight(self, n: float) -> None:
        """Weight this rank's batch by `n`, the number of samples or tokens that its loss is a mean over.

        Call it in each step on all workers, before the forward pass. It is collective where a strategy averages the
        gradients of workers that take their steps together (allreduce, hardsync): a gradient then counts n over the
        mean n of all, so that the update is along the mean over all workers' samples, or tokens. With softsync and ssp,
        whose workers don't wait for each other, gradients count alike, and those of n = 0 not at all. Where ranks step
        along their own gradients this does nothing.

        A weight holds until the next batch, or the next call: where gradients of several batches add up to a step each
        batch is weighed by itself, and each counts as much as in one process that has all ranks' samples of it.

        Messages: an all-reduce of one number for each worker.

        Raises:
            ConfigError: n is negative or not finite; or gradients add up, or are of micro-batches in a pipeline.
        """
        n, model, contract = float(n), self.strategy.model, self.strategy.contract
        if not (math.isfinite(n) and n >= 0):
            raise ConfigError(f"n must be a finite number, at least 0; got {n}. Count what the loss is a mean over.")
        if self.strategy.adds_up:
            raise rules.error("a sum is weighed")
        if isinstance(model.module, Pipeline):
            raise rules.error(_MICRO_BATCHES, found="optimizer.set_batch_weight()")
        if contract.weights_batches and contract.synchronous:
            peers = self.attachment.peers
            model.gradients.set_batch_weight(
                relative(counts_of(peers, n if model.gradients.counts else 0)[0], peers.rank)
            )
        elif contract.weights_batches:
            model.gradients.set_batch_weight(float(n > 0))

    def weigh(self, *_: object) -> None:
        """Refused: the name of before."""
        raise ConfigError(
            "optimizer.weigh must be called by its name now; got a call. Write optimizer.set_batch_weight(n)."
        )

    def synchronize(self) -> None:
        """Collective where ranks average gradients. Average those that are not averaged yet, before a step uses them.

        Raises ConfigError where servers make the updates, of several workers' gradients.
        """
        rules.refuse("synchronize() is called", self.strategy)
        self.strategy.synchronize()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Do nothing, for loops written for Horovod: a step never averages gradients that are averaged already."""
        return nullcontext()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes in the context only add to this rank's gradients: all but the last of an accumulation."""
        with self.strategy.no_sync():
            yield

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle or copy the plain optimiser, with this rank's state."""
        self._warn_of_parts()
        own: Any = self
        return object.__new__, (type(self).__bases__[1],), own.__getstate__()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state of the local optimiser; warn where each of several servers has a part of it only."""
        self._warn_of_parts()
        return self.attachment.local_state_dict()

    def _warn_of_parts(self) -> None:
        holders = self.strategy.config.optimizer_ranks(self.strategy.comm.size)
        if self.strategy.comm.size > 1 and len(holders) > 1:
            warnings.warn(
                f"The optimiser's state is in parts, on the servers, ranks {holders}; this is rank "
                f"{self.strategy.comm.rank}'s. Save it by hpcdist.save(..., optimizer=optimizer).",
                stacklevel=3,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, such as a layer that is unfrozen later.

        Raises ConfigError where the model lacks one, and where servers have the numbers of the groups that there were.
        """
        given = param_group["params"]
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        rules.refuse("a group of parameters is added", self.strategy, count=len(given))
        self.strategy.model.admit(given)
        own: Any = self  # an optimiser, once it is one's class
        super().add_param_group({**param_group, "params": given})  # type: ignore[misc]
        self.strategy.hyperparameters = Hyperparameters(own)
        self.attachment.counts = [len(group["params"]) for group in own.param_groups]


class _Evaluating(_Distributed):
    """A mix-in for an optimiser whose step evaluates its closure several times, such as L-BFGS."""

    @_as_it_is
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective. Take one step on the batches of all ranks together; return the result of the optimiser's own.

        L-BFGS returns the loss at the step's start: the mean over the ranks.
        """
        if closure is None:
            raise rules.error("such an optimiser is given no closure", optimizer=type(self).__name__)
        strategy = self.strategy
        self._require_own_step(strategy)
        strategy.model.refresh()
        frozen = next((slot.name for slot in strategy.model.slots if not slot.tensor.requires_grad), None)
        if frozen is not None:
            rules.refuse("a layer is frozen later", strategy, name=frozen)
        own = self.attachment
        own.record, loss = strategy.minimise(own.local_step, closure)
        if own.write is not None:
            own.write(own.record)
        compare_first_batches(self)
        return loss


class _Usual(_Distributed, torch.optim.Optimizer):
    """Has the methods that every distributed optimiser has."""


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
    """Collective. Make `optimizer` train `model` together with the other ranks; change it in place and return it.

    The model must be on its device; its parameters move into flat memory, and rank 0's values go to all. Parameters
    that the optimiser has beside the model's, such as a loss function's, are trained too. Several optimisers may each
    have a part of one model's parameters. Learning-rate schedules and `state_dict` work as before. An optimiser whose
    step needs a closure, such as LBFGS, may evaluate it several times; each time gradients and loss are averaged over
    the ranks. torch's SyncBatchNorm layers become `hpcdist.SyncBatchNorm`.

    For a model in stages, from `hpcdist.pipeline`, the optimiser has `model.parameters()`, this rank's stage. It trains
    this stage together with the same stages of the other replicas, and `model.step` calls its step. If gradients are
    not finite in one stage, they count as not finite in all stages of the replica.

    Args:
        strategy: a name of `hpcdist.strategies.available()`, or `path/to/file.py:Class`. None: allreduce, or the one
            that `hpcdist compare` or `sweep` has planned for this run.
        clip_norm: largest 2-norm of all gradients together: with allreduce and hardsync (on several servers too) that
            of the mean gradient of an update; else that of each rank's own gradient, before it is sent or used. For a
            model in stages it is the norm over all stages.
        bucket_bytes: gradients are reduced in buckets of about this size.
        loss: what the loss of a batch is: "mean" over its samples, or "sum". With "sum" gradients are added over the
            workers where a strategy would average them. Strategies whose ranks step alone, or whose servers update with
            each gradient, step along the sum over the rank's own batch.
        buffers: what becomes of buffers that change, by name or pattern (`"head.*"`): "mean" of the workers', "first",
            the first worker's on all ranks, as with DistributedDataParallel, or "own", each rank's while it trains. By
            default running statistics of torch's normalisation layers are averaged, and others the first worker's.
        identical_batches: what to do if the first gradients of all workers are the same to the bit, as in a loop
            without `shard` and with one seed: a warning, or nothing with "allow".
        options: the strategy's own, see its Config or `hpcdist strategies`.

    Raises:
        ConfigError: an option is unknown or out of range, or does not suit an optimiser that must be given a closure:
            its strategy must support closures, as allreduce does, without clipping and without leaving out steps.
        MismatchError: ranks differ in strategy, options, optimiser or model, or in a plug-in's file.
    """
    session = current()
    if session.planned is not None:
        strategy, options = session.planned.chosen(strategy, options)
    strategy = strategy or "allreduce"
    require_own_names(options)
    if isinstance(optimizer, _Distributed):
        raise rules.error("an optimiser is distributed twice")
    model = checked_model(optimizer, model, clip_norm)
    require_in_stages(session, model)
    outer, stages = session.outer, session.stages
    if outer.size > 1:
        require_no_norms(model)
    cls = strategies.load(strategy)
    config = cls.Config.from_mapping(options, "strategy")
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    require_known(loss=(loss, get_args(Loss)), identical_batches=(identical_batches, ("warn", "allow")))
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
    if stages > 1:  # of which each may have groups of its own
        ranks_of_stage = range(session.comm.rank % stages, session.comm.size, stages)
        require_equal(outer, {"groups": groups}, "param_groups of a stage", ranks_of_stage)
    evaluating = must_have_closure(optimizer)
    if evaluating:
        check_evaluating(type(optimizer).__name__, strategy, cls, config, clip_norm)
    if stages > 1:
        check_optimizer(optimizer, model, evaluating, cls)
    flat = _flat(optimizer, model, bucket_bytes, buffers, session.optimizers)
    replicas = config.workers(outer.size)
    if isinstance(model, Pipeline) and model.routing is not None and len(replicas) < outer.size:
        raise rules.error("micro-batches go to other replicas", cls)
    ranks = session.ranks_of(replicas)
    if session.told_main and ranks[0] != 0:
        raise rules.error("is_main() is called before rank 0 serves", cls, worker=ranks[0])
    peers = _split_off(outer, replicas)
    workers = peers if stages == 1 else _split_off(session.comm, ranks)
    synchronise_batch_norms(flat, cls, peers)
    local_class = type(optimizer)
    local_step = _refreshing(optimizer, flat, session.comm.trace)
    vars(optimizer).pop("step", None)  # a learning-rate schedule puts its own there, which would pass by ours
    stages_agree = model.agreement if isinstance(model, PartOfModel) else None
    made = cls(config, outer.split(0), flat, optimizer=optimizer, clip_norm=clip_norm, loss=loss, stages=stages_agree)
    if not hasattr(made, "steps"):
        raise ConfigError(
            f"__init__ of {cls.__name__} must call that of Strategy; got a strategy without state. Write "
            "super().__init__(config, comm, model, **kwargs) as its first line."
        )
    require_same_files(session.comm)  # also what it has loaded by now: a topology
    made.gradients.checksums = [] if peers.size > 1 and identical_batches == "warn" else None
    flat.mark()
    counts = [len(group["params"]) for group in optimizer.param_groups]
    added = _Evaluating if evaluating or cls.contract.batch == "portions" else _Distributed
    changed: Any = optimizer  # gets a class made here, which no checker of types knows
    changed.__class__ = type(local_class.__name__, (added, local_class), guarded_methods(local_class, _Usual))
    local_state_dict = local_class.state_dict.__get__(optimizer)
    looks = rules.forbids("parameters are changed between steps", made)
    guard = guard_against_ddp(model)
    changed.attachment = Attachment(made, local_step, local_state_dict, workers, peers, counts, looks, guard)
    changed._opt_called = True  # ... and where they find none before their own; a server's worker never makes one
    session.optimizers.append(optimizer)
    session.serves, session.workers = session.serves or not made.is_worker, ranks
    if isinstance(model, PartOfModel):
        model.optimizers.append(changed)
    if session.run is not None and session.run.start(changed, ranks, settings_of(changed)):
        changed.attachment.write = session.run.write
        if session.planned is not None:  # on real ranks this does nothing
            changed.attachment.compute = session.comm.compute
    return optimizer


def _refreshing(optimizer: Any, flat: FlatModel, trace: Trace) -> Callable[..., Any]:
    """Return an optimiser's step after which its new values lie in flat memory, also where it has set `p.data`."""
    step = type(optimizer).step.__get__(optimizer)

    @functools.wraps(step)
    def local_step(*given: Any) -> Any:
        scaled = {name: vars(optimizer).pop(name) for name in _SCALED if name in vars(optimizer)}
        try:
            with trace.span("update", "compute"):
                with optimizer.attachment.run_own():
                    result = step(*given)
                flat.refresh()
        finally:
            vars(optimizer).update(scaled)  # which the scaler takes away
        return result

    return local_step


def release(optimizer: Any) -> None:
    """Collective. Make it a plain optimiser again, which trains this rank's model alone."""
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
    """Collective. Return a communicator of the ranks that run the loop's body."""
    return comm if len(ranks) == comm.size else comm.split(0 if comm.rank in ranks else 1)


def _flat(
    optimizer: torch.optim.Optimizer, model: nn.Module, bucket_bytes: int, buffers: Any, others: list[Any]
) -> FlatModel:
    """Lay out in flat memory all that the optimiser trains; the model's rest too, unless another optimiser has it."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    names = {id(p): name for name, p in model.named_parameters()}
    for other in others:
        taken = {id(slot.tensor) for slot in other.strategy.model.slots}
        twice = next((names.get(id(p), "a parameter") for p in own if id(p) in taken), None)
        if twice is not None:
            raise rules.error("two optimisers have one parameter", name=twice)
    extra = [(f"optimizer parameter {i}", p) for i, p in enumerate(own) if id(p) not in names]
    rest = all(other.strategy.model.module is not model for other in others)
    return FlatModel(model, bucket_bytes=bucket_bytes, extra=extra, only=own, buffers=buffers, rest=rest)
