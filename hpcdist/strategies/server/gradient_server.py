"""Take workers' gradients, make updates of them as a policy says, and reply with parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from hpcdist.comm.transfer import WIDE
from hpcdist.model.flat import FlatModel
from hpcdist.model.hyperparameters import unequal, unequal_steps
from hpcdist.strategies.base import Update
from hpcdist.strategies.common.state import copy_all
from hpcdist.strategies.server.channel import GRADIENT, NOBODY, SUM, Reply, ServerRequest
from hpcdist.strategies.server.loop import Handler
from hpcdist.strategies.server.placement import Shard
from hpcdist.strategies.server.policy import Held, Policy
from hpcdist.strategies.server.strategy import ServerStrategy
from hpcdist.strategies.server.worker import GradientWorker


class Aggregate:
    """Add gradients as they are taken from their slots, then apply them at once.

    Args:
        apart: the sum gets memory of its own, because the model's gradients are needed between updates.

    Attributes:
        clocks: of the gradients in the sum.
        factors: how much less each of them counts for its staleness; the caller's to restore after `load_state_dict`.
        weights: of the requests in the sum.
        values: the hyper-parameters of each worker whose request is in the sum.
        used: which parameters have a gradient in the sum.
    """

    def __init__(self, model: FlatModel, shard: Shard, *, apart: bool):
        self._model, self._shard = model, shard
        slices = list(model.named_slices())
        self._owned = torch.tensor([shard.overlaps(g, a, b) for _, g, a, b, _ in slices], dtype=torch.bool)
        self._outside = [outside for _, g, a, b, _ in slices for outside in shard.outside(g, a, b)]
        for flat in model.grads:
            flat.zero_()  # what lies outside the shard must be finite: it may reach the optimiser
        grads = shard.of(model.grads)
        # So do sums of 16-bit floats, which are rounded once: that of float16 may be beyond the range of its mean.
        self.sums = [torch.zeros_like(g, dtype=WIDE.get(g.dtype)) if apart or g.dtype in WIDE else g for g in grads]
        self._apart = apart
        self.used = torch.zeros(len(slices), dtype=torch.bool)
        self.forget()

    def forget(self) -> None:
        """Begin a new update."""
        self.clocks: list[int] = []
        self.factors: list[float] = []
        self.weights: list[float] = []
        self.values: dict[int, list[float]] = {}
        self.used.zero_()

    def add(self, request: ServerRequest, factor: float = 1.0) -> None:
        """Add a request's weighted gradient to the sum; `factor` is how much less it counts for its staleness."""
        scale = factor if request.kind == SUM else request.weight * factor  # a sum's addends are weighted already
        for total, arrived in zip(self.sums, request.tensors, strict=True):
            if not self.weights:
                total.copy_(arrived)
                if scale != 1.0:
                    total.mul_(scale)
            elif scale != 1.0:  # rounded as all-reduce rounds it, not fused
                total.add_(arrived.to(total.device) * scale)
            else:
                total.add_(arrived.to(total.device))
        self.clocks += request.clocks
        self.factors += [factor] * len(request.clocks)
        self.weights.append(request.weight)
        self.values[request.source] = request.values.tolist()
        self.used |= request.used

    def total_weight(self) -> float:
        """Return the sum of the weights; that of one whole step is exactly the number of its workers."""
        total = math.fsum(self.weights)
        return float(round(total)) if abs(total - round(total)) < 1e-9 * total else total

    def mean_values(self) -> list[float]:
        """Return the mean of each hyper-parameter over the workers whose gradients are in the sum."""
        columns = zip(*self.values.values())
        return [column[0] if len(set(column)) == 1 else math.fsum(column) / len(column) for column in columns]

    def apply(self, update: Update, divisor: float, rate: float = 1.0, clip: Callable[[], None] | None = None) -> None:
        """Run the optimiser on sum / divisor, clipped, with its learning rate times `rate`, and begin a new update.

        The rate is modulated by taking only that part of the optimiser's step, which is the same for every optimiser
        whose step is proportional to its rate: all of torch's but LBFGS and Rprop.
        """
        for grad, total in zip(self._shard.of(self._model.grads), self.sums, strict=True):
            if divisor != 1.0:
                total.div_(divisor)
            if total.data_ptr() != grad.data_ptr():
                grad.copy_(total)
        had = [parameter.grad is not None for parameter in self._model.parameters()] if self._apart else []
        self._model.gradients.release(self.used & self._owned)
        if clip is not None:
            clip()
        params = self._shard.of(self._model.params) if rate != 1.0 else []
        before = [p.clone() for p in params]
        # An optimiser changes whole parameters, also where a shard's border cuts one; the other side stays.
        outside = [self._model.params[group][start:stop] for group, start, stop in self._outside]
        saved = [view.clone() for view in outside]
        update()
        if self._apart:  # the worker's loop may look at its gradients
            self._model.gradients.release(had)
        copy_all(outside, saved)
        for old, new in zip(before, params):
            torch.lerp(old, new, rate, out=new)
        self.forget()

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the update under way."""
        sums: list[Tensor] = [total.clone() for total in self.sums] if self.weights else []
        begun = {"clocks": self.clocks, "weights": self.weights, "values": list(self.values.items())}
        return {"sums": sums, **begun, "used": self.used.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        copy_all(self.sums, state["sums"])
        self.clocks, self.weights = list(state["clocks"]), list(state["weights"])
        self.values = dict(state.get("values", []))
        self.used = torch.tensor(state["used"], dtype=torch.bool)


@dataclass(eq=False)
class HeldRequest(Held):
    """Hold a gradient with its request, since `since_s`."""

    request: ServerRequest = field(kw_only=True)
    since_s: float = field(kw_only=True)


class GradientServer(Handler):
    """Serve a shard: hold gradients until their workers may go on, and update with the sum of those that make one.

    An aggregator passes the sum on to its own parent instead, and its workers get that one's reply.
    """

    def __init__(self, strategy: ServerStrategy, policy: Policy):
        self.policy, self._loop, self._place, self._now = policy, strategy.loop, strategy.place, strategy.comm.now
        self._model, self._hyperparameters = strategy.model, strategy.hyperparameters
        self._channel, self._replica, self._clip = strategy.channel, strategy.replica, strategy.update_clip
        self._of_all_workers, self._workers = strategy.contract.synchronous, len(strategy.roles.workers)
        self._adds_up = strategy.adds_up
        self.aggregate = Aggregate(self._model, self._place.shard, apart=self._place.colocated)
        self._held: list[HeldRequest] = []
        for name in policy.remembers:
            setattr(policy, name, strategy.state.value(name, getattr(policy, name), policy, optional=True))
        # A checkpoint includes these gradients; another number of ranks begins without, and the run's end loses them.
        aggregate = self.aggregate
        strategy.state.scratch(aggregate.sums)
        strategy.state.custom("store", aggregate.state_dict, self._load_aggregate, aggregate.forget, optional=True)
        strategy.records.pending = lambda: len(aggregate.clocks)

    def master(self) -> list[Tensor]:
        return self._place.shard.of(self._model.params)

    def receive(self, request: ServerRequest) -> None:
        """Refuse a gradient, or hold it until its worker may go on."""
        staleness = self._replica.clock - min(request.clocks) if request.weight else 0
        reason = self.policy.arrived(request.source, staleness)
        if reason is not None:
            self._loop.reply(Reply(request, self._replica.clock, self.master()))
            self._loop.drop(request, reason)
            return
        nothing_to_add, since_s = request.weight == 0.0, self._now()
        self._held.append(HeldRequest(request.source, request.clocks, nothing_to_add, request=request, since_s=since_s))
        self.settle()

    def settle(self) -> None:
        """Make the update that is due, and reply to the workers that may go on."""
        policy, parameters = self.policy, self.master()
        active = self._loop.active() if policy.waits else ()
        due = policy.complete(self._held, len(self.aggregate.clocks), active)
        for gradient in sorted(self._held, key=attrgetter("source")) if due else self._held:
            if not gradient.added and (due or policy.may_go(gradient, active)):
                gradient.added = True
                staleness = self._replica.clock - gradient.clocks[0]  # an aggregator doesn't know it yet
                self.aggregate.add(gradient.request, 1.0 if self._place.aggregates else policy.factor(staleness))
            gradient.applied |= due
        if due and self._place.aggregates:
            self._pass_on()
        elif due and self.aggregate.weights:
            self._update()
        going, waiting = [], []
        for gradient in self._held:
            if policy.may_go(gradient, active):
                held_s = self._now() - gradient.since_s if gradient.blocker != NOBODY else 0.0
                going.append(Reply(gradient.request, self._replica.clock, parameters, gradient.blocker, held_s))
            else:
                if gradient.blocker == NOBODY:
                    gradient.blocker = policy.blocker(active)
                waiting.append(gradient)
        self._held = waiting
        self._loop.reply(*going)

    def returned(self, child: int) -> None:
        self.policy.returned(child, self._loop.active())

    def _update(self) -> None:
        """Run the optimiser on the sum, with the workers' hyper-parameters."""
        policy, aggregate, loop = self.policy, self.aggregate, self._loop
        staleness = [self._replica.clock - clock for clock in aggregate.clocks]
        # Weights of an average times one rate: gradients keep their proportions, and an optimiser that undoes a
        # constant factor of its gradients, as Adam does, is modulated all the same.
        rate = sum(aggregate.factors) / len(aggregate.factors)
        if self._of_all_workers:
            self._require_equal_values()
        values = aggregate.mean_values()[: len(self._hyperparameters.places)]
        if values != self._hyperparameters.values():
            self._hyperparameters.set(values)
        present = self._workers - len(loop.liveness.evicted)
        averaged = present if policy.divides_by_workers else aggregate.total_weight()
        divisor = 1.0 if self._adds_up else averaged
        aggregate.apply(self._hyperparameters.noting(loop.update), divisor * rate, rate, self._clip)
        policy.updated(staleness)
        loop.count_update(staleness)

    def _require_equal_values(self) -> None:
        """Raise MismatchError unless equal numbers have come along with all gradients in the sum."""
        values = self.aggregate.values
        left_out = {rank: int(numbers[-1]) for rank, numbers in values.items()}
        found = unequal(self._hyperparameters, values, "every worker")
        found = found or unequal_steps(left_out, "batches that were left out")
        if found is not None:
            raise found

    def _pass_on(self) -> None:
        """Push the sum to this aggregator's parent, and take the reply, which is the children's too."""
        aggregate, client = self.aggregate, self._channel.client
        if aggregate.weights:
            if self._of_all_workers:
                self._require_equal_values()
            weight, values = math.fsum(aggregate.weights), aggregate.mean_values()
            client.push(SUM, [aggregate.clocks], aggregate.sums, aggregate.used, weight, values)
        else:
            client.push(GRADIENT, [[]])  # it arrives, and counts for nothing
        self._replica.take(client.wait(), self._channel.down.arrived)
        aggregate.forget()

    # --- checkpoints ----------------------------------------------------------------------------------------------
    def _load_aggregate(self, saved: Mapping[str, Any]) -> None:
        """Restore the sum under way, whose gradients count by their staleness as the policy has been told of it."""
        self.aggregate.load_state_dict(saved)
        self.aggregate.factors = [self.policy.factor(self._replica.clock - clock) for clock in self.aggregate.clocks]


def exchange_gradients(strategy: ServerStrategy, policy: Policy, *, overlap: bool = False) -> None:
    """Compose a strategy whose servers update by this policy; see `GradientWorker` for `overlap`."""
    strategy.compose(lambda: GradientWorker(strategy, overlap=overlap), lambda: GradientServer(strategy, policy))
