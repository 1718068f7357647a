"""Take workers' gradients, make updates of them as a policy says, and reply with parameters."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import TYPE_CHECKING

from torch import Tensor

from hpcdist.model.hyperparameters import unequal, unequal_steps
from hpcdist.strategies.common.state import Entry, dropped
from hpcdist.strategies.server.aggregate import Aggregate
from hpcdist.strategies.server.loop import Handler
from hpcdist.strategies.server.policy import Held, Policy
from hpcdist.strategies.server.requests import GRADIENT, NOBODY, SUM, Reply, ServerRequest

if TYPE_CHECKING:
    from hpcdist.strategies.server.strategy import ServerStrategy


class GradientServer(Handler):
    """Serve a shard: hold gradients until their workers may go on, and update with the sum of those that make one.

    An aggregator passes the sum on to its own parent instead, and its workers get that one's reply.
    """

    def __init__(self, strategy: ServerStrategy, policy: Policy):
        self.policy, self._loop, self._place, self._now = policy, strategy.loop, strategy.place, strategy.comm.now
        self._model, self._hyperparameters = strategy.model, strategy.hyperparameters
        self._channel, self._replica, self._clip = strategy.channel, strategy.replica, strategy.update_clip
        self._of_all_workers, self._workers = strategy.of_all_workers, len(strategy.roles.workers)
        self.aggregate = Aggregate(self._model, self._place.shard, apart=self._place.colocated)
        self._held: list[Held] = []

    def master(self) -> list[Tensor]:
        return self._place.shard.of(self._model.params)

    def receive(self, request: ServerRequest) -> None:
        """Refuse a gradient, or hold it until its worker may go on."""
        staleness = self._loop.clock - min(request.clocks) if request.weight else 0
        reason = self.policy.arrived(request.source, staleness)
        if reason is not None:
            self._loop.reply(Reply(request, self._loop.clock, self.master()))
            self._loop.drop(request, reason)
            return
        nothing_to_add = request.weight == 0.0
        self._held.append(Held(request.source, request.clocks, nothing_to_add, request=request, since_s=self._now()))
        self.settle()

    def settle(self) -> None:
        """Make the update that is due, and reply to the workers that may go on."""
        policy, parameters = self.policy, self.master()
        active = self._loop.active() if policy.waits else ()
        due = policy.complete(self._held, len(self.aggregate.clocks), active)
        for gradient in sorted(self._held, key=attrgetter("source")) if due else self._held:
            if not gradient.added and (due or policy.may_go(gradient, active)):
                gradient.added = True
                staleness = self._loop.clock - gradient.clocks[0]  # an aggregator doesn't know it yet
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
                going.append(Reply(gradient.request, self._loop.clock, parameters, gradient.blocker, held_s))
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
        staleness = [loop.clock - clock for clock in aggregate.clocks]
        # Weights of an average times one rate: gradients keep their proportions, and an optimiser that undoes a
        # constant factor of its gradients, as Adam does, is modulated all the same.
        rate = sum(aggregate.factors) / len(aggregate.factors)
        if self._of_all_workers:
            self._require_equal_values()
        values = aggregate.mean_values()[: len(self._hyperparameters)]
        if values != self._hyperparameters.values():
            self._hyperparameters.set(values)
        present = self._workers - len(loop.liveness.evicted)
        divisor = present if policy.divides_by_workers else aggregate.total_weight()
        aggregate.apply(loop.update, divisor * rate, rate, self._clip)
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
            whole = {"tensors": aggregate.sums, "used": aggregate.used, "weight": math.fsum(aggregate.weights)}
            client.push(SUM, [aggregate.clocks], values=aggregate.mean_values(), **whole)
        else:
            client.push(GRADIENT, [[]])  # it arrives, and counts for nothing
        self._replica.take(client.wait(), self._channel.down.arrived)
        self._loop.clock = self._replica.clock
        aggregate.forget()

    # --- checkpoints ----------------------------------------------------------------------------------------------
    @property
    def pending(self) -> int:
        """Count the gradients in the sum that no update has applied yet.

        A checkpoint includes them; another number of ranks begins without, and the run's end loses them.
        """
        return len(self.aggregate.clocks)

    def entries(self) -> list[Entry]:
        store = Entry("store", self.aggregate.state, self._load_aggregate, dropped(), optional=True)
        return [*self.policy.entries(), store]

    def _load_aggregate(self, saved: dict | None) -> None:
        """Take up the sum under way, whose gradients count by their staleness as the policy has been told of it."""
        self.aggregate.forget()
        if saved is not None:
            self.aggregate.load_state(saved)
            self.aggregate.factors = [self.policy.factor(self._loop.clock - clock) for clock in self.aggregate.clocks]
