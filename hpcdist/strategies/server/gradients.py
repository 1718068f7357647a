"""Workers push gradients; servers update by a policy and reply with parameters."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hpcdist.comm.transfer import WIDE
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.model.hyperparameters import unequal, unequal_steps_error
from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.common.state import copy_all
from hpcdist.strategies.server.channel import GRADIENT, NOBODY, SUM, Reply, ServerRequest
from hpcdist.strategies.server.placement import Shard
from hpcdist.strategies.server.server import Server
from hpcdist.strategies.server.strategy import ServerStrategy, Worker


class Policy(abc.ABC):
    """Decides when a server updates with its waiting gradients, and which workers get their reply.

    It knows neither ranks nor tensors. `active` are the workers that have not paused.

    A gradient whose worker continues before the update is added to a sum, in order of arrival; the others are added in
    rank order at the update.
    """

    remembers: ClassVar[tuple[str, ...]] = ()  # attributes to save in checkpoints, of JSON's types
    waits = True  # workers may have to wait for others; else `active` is empty
    divides_by_workers = False  # an update is Σg/λ for λ workers; else Σwg/Σw, with weights by samples

    @abc.abstractmethod
    def complete(self, gradients: Sequence[ServerRequest], summed: int, active: Sequence[int]) -> bool:
        """Return whether to update now with the waiting `gradients`, when `summed` others are in the sum already."""

    @abc.abstractmethod
    def may_go(self, gradient: ServerRequest, active: Sequence[int]) -> bool:
        """Return whether to reply to a gradient's worker now, with the current parameters."""

    def arrived(self, source: int, staleness: int) -> str | None:
        """Record a worker's step; return the reason to drop its gradient, or None to accept it."""
        return None

    def factor(self, staleness: int) -> float:
        """Return the weight of a gradient by its staleness."""
        return 1.0

    def blocker(self, active: Sequence[int]) -> int:
        """Return the rank that waiting workers wait for."""
        return NOBODY

    def updated(self, staleness: Sequence[int]) -> None:
        """Record an update with gradients of these staleness values."""

    def returned(self, worker: int, active: Sequence[int]) -> None:
        """Record that an evicted worker has pushed again."""


class GradientWorker(Worker):
    """Push the gradient with the clock of the parameters it was computed from, and copy the reply into the model.

    With the option `overlap` continue immediately, and take the reply in the next step.

    Raises:
        ConfigError: `overlap` on servers that are workers too.
    """

    def __init__(self, strategy: ServerStrategy):
        super().__init__(strategy)
        self._overlap = getattr(strategy.config, "overlap", False)
        if self._overlap and self.replica.colocated:
            raise ConfigError(
                "strategy.overlap must be false where strategy.servers is 'colocated', whose shards change only inside "
                "a step; got true. Leave it out, or give ranks of their own to the servers."
            )
        self._clips = strategy.gradients.clip_norm is not None and strategy.update_norm is None
        self._compression = strategy.config.compression
        workers, first = strategy.roles.workers, self._compression.warmup_ranks
        sits_out = first is not None and workers.index(self.strategy.comm.rank) >= first
        self._first_step = self._compression.warmup_steps if sits_out else 0  # in the warm-up only the first ranks push
        self._in_flight = False  # a gradient was pushed and its reply not taken

    def step(self, update: Update) -> Outcome:
        """Push the gradient, and pull new parameters: before the next step, or with `overlap` just before its push.

        A worker whose gradient does not count (weight 0, skipped, warm-up) pushes an empty request, because the server
        counts a request of each worker; with `overlap` it pushes nothing.
        """
        strategy, gradients = self.strategy, self.model.gradients
        weight = gradients.mean_weight
        contributes, weight = weight > 0, weight if strategy.contract.weights_batches else 1.0
        used, skipped = gradients.collect(), strategy.gradients.skipped()
        if self._clips and not skipped:
            strategy.gradients.clip(weight)
        stamps = self.stamps()  # before `finish`, which replaces the parameters that the gradient was computed from
        if self._overlap:
            self.finish()
        dropped = None
        if strategy.steps < self._first_step and not skipped:
            ranks = self._compression.warmup_ranks
            dropped = f"dropped: a gradient of the warm-up, in which only {ranks} workers' count"
        pushes = contributes and not skipped and not dropped
        if pushes:
            self.client.push(SUM, **stamps, tensors=self.model.grads, used=used, weight=weight)
        elif not self._overlap:
            self.client.push(GRADIENT, **stamps)  # weight 0: a request without a gradient
        waited_for: dict[int, float] = {}
        if self._overlap:
            self._in_flight = pushes
        else:
            waited_for = self.replica.pull().waited_for
        event, count = skipped or dropped, int(dropped is not None)
        return Outcome(self.replica.clock, event=event, dropped=count, waited_for=waited_for)

    def finish(self) -> None:
        if self._in_flight:
            self.replica.pull()
            self._in_flight = False


class Aggregate:
    """A weighted sum of received gradients, and the update with it.

    Args:
        apart: allocate memory for the sum, because the model's gradients are needed between updates.

    Attributes:
        clocks: the clock of each gradient in the sum: how many updates the parameters had that it was computed from.
        factors: the weight of each gradient by its staleness; to be restored after `load_state_dict`.
        weights: the weight of each request in the sum.
        values: the hyper-parameters of each worker with a request in the sum.
        used: which parameters have a gradient in the sum.
    """

    def __init__(self, model: FlatModel, shard: Shard, *, apart: bool):
        self._model, self._shard = model, shard
        extents = [(slot.group, slot.start, slot.stop) for slot in model.slots]
        self._owned = torch.tensor([shard.overlaps(*extent) for extent in extents], dtype=torch.bool)
        self._outside = [outside for extent in extents for outside in shard.outside(*extent)]
        for flat in model.grads:
            flat.zero_()  # elements outside the shard must be finite: the optimiser may read them
        grads = shard.of(model.grads)
        # Sums of 16-bit floats have wider memory: they are rounded once, and may exceed the range of float16.
        self.sums = [torch.zeros_like(g, dtype=WIDE.get(g.dtype)) if apart or g.dtype in WIDE else g for g in grads]
        self._apart = apart
        self.used = torch.zeros(len(extents), dtype=torch.bool)
        self.forget()

    def forget(self) -> None:
        """Start a new sum."""
        self.clocks: list[int] = []
        self.factors: list[float] = []
        self.weights: list[float] = []
        self.values: dict[int, list[float]] = {}
        self.used.zero_()

    def add(self, request: ServerRequest, factor: float = 1.0) -> None:
        """Add a request's tensors, times `factor` (of its staleness), to the sum.

        Tensors of a SUM are multiplied by their batch weights already, by the worker's hooks or by an aggregator.
        """
        scale = factor if request.kind == SUM else request.weight * factor
        for total, arrived in zip(self.sums, request.tensors, strict=True):
            if not self.weights:
                total.copy_(arrived)
                if scale != 1.0:
                    total.mul_(scale)
            elif scale != 1.0:  # rounded like all-reduce, not fused
                total.add_(arrived.to(total.device) * scale)
            else:
                total.add_(arrived.to(total.device))
        self.clocks += request.clocks
        self.factors += [factor] * len(request.clocks)
        self.weights.append(request.weight)
        self.values[request.source] = request.values.tolist()
        self.used |= request.used

    def total_weight(self) -> float:
        """Return the sum of the weights; of one step of all workers exactly their number."""
        total = math.fsum(self.weights)
        return float(round(total)) if abs(total - round(total)) < 1e-9 * total else total

    def mean_values(self) -> list[float]:
        """Return the mean of each hyper-parameter over the workers whose gradients are in the sum."""
        columns = zip(*self.values.values())
        return [column[0] if len(set(column)) == 1 else math.fsum(column) / len(column) for column in columns]

    def apply(self, update: Update, divisor: float, rate: float = 1.0, clip: Callable[[], None] | None = None) -> None:
        """Run the optimiser on sum / divisor, clipped, with its learning rate times `rate`, and start a new sum.

        The step is multiplied by `rate`, which equals a multiplied learning rate for every optimiser whose step is
        proportional to it: all of torch's but LBFGS and Rprop.
        """
        for grad, total in zip(self._shard.of(self._model.grads), self.sums, strict=True):
            if divisor != 1.0:
                total.div_(divisor)
            if total.data_ptr() != grad.data_ptr():
                grad.copy_(total)
        present = self._model.gradients.present() if self._apart else []
        self._model.gradients.release(self.used & self._owned)
        if clip is not None:
            clip()
        params = self._shard.of(self._model.params) if rate != 1.0 else []
        old_params = [p.clone() for p in params]
        # The optimiser changes whole parameters; restore elements outside the shard where its border splits one.
        outside = [self._model.params[group][start:stop] for group, start, stop in self._outside]
        saved = [view.clone() for view in outside]
        update()
        if self._apart:  # the worker's loop may read its gradients
            self._model.gradients.release(present)
        copy_all(outside, saved)
        for old, new in zip(old_params, params):
            torch.lerp(old, new, rate, out=new)
        self.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the unfinished sum, for a checkpoint: gradients that were received and are not in an update yet.

        `values` are pairs (rank, hyper-parameters), because JSON has no integer keys. `factors` are not saved: the
        server computes them again from `clocks`, see `GradientServer._load_aggregate`.
        """
        sums: list[Tensor] = [total.clone() for total in self.sums] if self.weights else []
        unfinished = {"clocks": self.clocks, "weights": self.weights, "values": list(self.values.items())}
        return {"sums": sums, **unfinished, "used": self.used.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        copy_all(self.sums, state["sums"])
        self.clocks, self.weights = list(state["clocks"]), list(state["weights"])
        self.values = dict(state.get("values", []))
        self.used = torch.tensor(state["used"], dtype=torch.bool)


class GradientServer(Server):
    """Serve a shard: collect gradients, update and reply by the policy.

    An aggregator pushes the sum to its parent instead of updating, and forwards the parent's reply to its children.
    """

    def __init__(self, strategy: GradientStrategy):
        super().__init__(strategy)
        self.policy, self._synchronous = strategy.policy(), strategy.synchronous
        policy = self.policy
        self._count = len(strategy.hyperparameters)
        norm, self._servers = strategy.update_norm, strategy.servers
        self._clip = None if norm is None else partial(self._clip_update, norm)
        self.aggregate = aggregate = Aggregate(self.model, self.replica.shard, apart=self.replica.colocated)
        for name in policy.remembers:
            setattr(policy, name, strategy.state.value(name, getattr(policy, name), policy, optional=True))
        # A checkpoint includes these gradients; another number of ranks starts without, and the run's end drops them.
        strategy.state.scratch(aggregate.sums)
        strategy.state.custom("store", aggregate.state_dict, self._load_aggregate, aggregate.forget, optional=True)
        strategy.records.pending = lambda: len(aggregate.clocks)

    def holds(self, request: ServerRequest) -> bool:
        """Count a worker's step; return False for a gradient that the policy drops, after replying to it."""
        clock = self.replica.clock
        reason = self.policy.arrived(request.source, clock - min(request.clocks) if request.weight else 0)
        request.added = request.weight == 0.0  # no gradient to add
        if reason is not None:
            self.inbox.reply(Reply(request, clock, self.master()))
            self.report(Outcome(clock, event=reason, dropped=len(request.clocks)))
        return reason is None

    def apply_due(self) -> None:
        """Update if it is due, and reply to the workers that may continue."""
        policy, parameters = self.policy, self.master()
        active = self.active() if policy.waits else ()
        due = policy.complete(self.waiting, len(self.aggregate.clocks), active)
        for gradient in sorted(self.waiting, key=attrgetter("source")) if due else self.waiting:
            if not gradient.added and (due or policy.may_go(gradient, active)):
                gradient.added = True
                staleness = self.replica.clock - gradient.clocks[0]  # an aggregator doesn't know it yet
                self.aggregate.add(gradient, 1.0 if self.replica.aggregates else policy.factor(staleness))
            gradient.applied |= due
        if due and self.replica.aggregates:
            self._forward()
        elif due and self.aggregate.weights:
            self._update()
        replies, waiting = [], []
        for gradient in self.waiting:
            if policy.may_go(gradient, active):
                held_s = self.comm.now() - gradient.since_s if gradient.blocker != NOBODY else 0.0
                replies.append(Reply(gradient, self.replica.clock, parameters, gradient.blocker, held_s))
            else:
                if gradient.blocker == NOBODY:
                    gradient.blocker = policy.blocker(active)
                waiting.append(gradient)
        self.waiting = waiting
        self.inbox.reply(*replies)

    def returned(self, child: int) -> None:
        self.policy.returned(child, self.active())

    def _update(self) -> None:
        """Run the optimiser on the sum, with the workers' hyper-parameters."""
        policy, aggregate, strategy = self.policy, self.aggregate, self.strategy
        staleness = [self.replica.clock - clock for clock in aggregate.clocks]
        # `factors` reduce stale gradients, and the sum contains them. `apply` divides it by their mean, `rate`, and
        # multiplies the step by it: so the option `modulation` also affects optimisers, such as Adam, whose step
        # doesn't depend on the scale of gradients.
        rate = sum(aggregate.factors) / len(aggregate.factors)
        self._require_equal_values()
        values = aggregate.mean_values()[: self._count]
        if values != strategy.hyperparameters.values():
            strategy.hyperparameters.set(values)
        workers_here = len(self.strategy.roles.workers) - len(self.evicted)
        averaged = workers_here if policy.divides_by_workers else aggregate.total_weight()
        divisor = 1.0 if strategy.adds_up else averaged
        aggregate.apply(strategy.hyperparameters.track_counters(self.update), divisor * rate, rate, self._clip)
        policy.updated(staleness)
        self.count_update(staleness)

    def _clip_update(self, largest: float) -> None:
        """Collective among several servers. Clip the gradient by its norm over all shards."""
        if self._servers is None:
            nn.utils.clip_grad_norm_([slot.tensor for slot in self.model.slots], largest)
            return
        grads, square = self.replica.shard.of(self.model.grads), torch.zeros(1, dtype=torch.float64)
        for grad in grads:
            square += torch.linalg.vector_norm(grad, dtype=torch.float64).cpu() ** 2
        self._servers.allreduce(square)
        scale = largest / (float(square) ** 0.5 + 1e-6)
        for grad in grads if scale < 1.0 else ():
            grad.mul_(scale)

    def _require_equal_values(self) -> None:
        """In synchronous strategies, raise MismatchError where the workers' hyper-parameters differ."""
        if not self._synchronous:
            return
        values = self.aggregate.values
        skipped = {rank: int(numbers[-1]) for rank, numbers in values.items()}  # see `Worker.stamps`
        error = unequal(self.strategy.hyperparameters, values, "every worker")
        error = error or unequal_steps_error(skipped, "batches that were left out")
        if error is not None:
            raise error

    def _forward(self) -> None:
        """Push the sum to this aggregator's parent, and take the reply."""
        aggregate, client = self.aggregate, self.channel.client
        if aggregate.weights:
            self._require_equal_values()
            weight, values = math.fsum(aggregate.weights), aggregate.mean_values()
            client.push(SUM, [aggregate.clocks], aggregate.sums, aggregate.used, weight, values)
        else:
            client.push(GRADIENT, [[]])  # without a gradient
        self.replica.pull()
        aggregate.forget()

    def _load_aggregate(self, saved: Mapping[str, Any]) -> None:
        """Restore an unfinished sum, with the policy's weights by staleness, which the clocks determine."""
        self.aggregate.load_state_dict(saved)
        self.aggregate.factors = [self.policy.factor(self.replica.clock - clock) for clock in self.aggregate.clocks]


class GradientStrategy(ServerStrategy):
    """Base of strategies whose workers push gradients, and whose servers update by a policy."""

    worker_type, server_type = GradientWorker, GradientServer

    @abc.abstractmethod
    def policy(self) -> Policy:
        """Create the policy of this rank, a server or aggregator."""
