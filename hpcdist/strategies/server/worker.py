"""Take a worker's steps: push gradients, and go on with the parameters of the reply."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.common.state import Entry, dropped
from hpcdist.strategies.server.channel import GRADIENT, PAUSE, SUM, ReplyHead, waited_for
from hpcdist.strategies.server.placement import Placement

if TYPE_CHECKING:
    from hpcdist.strategies.server.strategy import ServerStrategy


class Replica:
    """Count the updates of the parameters in the model, and take new ones from replies, shard by shard.

    The shard of a rank that is worker and server lies in the model already: replies don't change it.

    Attributes:
        clock: updates of this rank's own shard on a server; else of the parameters in the model, of the first shard's.
        clocks: for each parent, updates of the parameters that have come from it.
        applied: staleness of the gradients applied here since this rank's last step, if it is worker and server.
    """

    def __init__(self, place: Placement, model: FlatModel):
        self._place, self._model = place, model
        others = [place.shards[parent] for parent in place.parents if parent != place.rank]
        self._shards = others if place.colocated else [place.everything]
        self.clock, self.clocks = 0, [0] * len(place.parents)
        self.applied: list[int] = []

    def stamps(self) -> list[list[int]]:
        """Return for each parent the clock of its parameters in the model, which goes along with a gradient."""
        parents = zip(self._place.parents, self.clocks, strict=True)
        return [[self.clock if parent == self._place.rank else clock] for parent, clock in parents]

    def take(self, heads: Sequence[ReplyHead], arrived: Sequence[Tensor]) -> None:
        """Copy what has arrived from all parents into the model."""
        for shard in self._shards:
            for params, values in zip(shard.of(self._model.params), shard.of(arrived), strict=True):
                params.copy_(values)
        self.clocks = [head.clock for head in heads]
        if not self._place.colocated:
            self.clock = self.clocks[0]

    def take_applied(self) -> tuple[int, ...]:
        """Return the staleness of the gradients applied here since the last call."""
        applied, self.applied = tuple(self.applied), []
        return applied

    def entries(self) -> list[Entry]:
        """Declare the clocks; on another number of ranks all parents have the largest one that was saved."""

        def load(clock: int) -> None:
            self.clock = clock

        def load_clocks(saved: Sequence[int]) -> None:
            self.clocks = list(saved) or [self.clock] * len(self._place.parents)

        return [
            Entry("clock", lambda: self.clock, load, max),
            Entry("clocks", lambda: self.clocks, load_clocks, dropped([])),
        ]


class Worker(abc.ABC):
    """Take the steps of a worker that has servers.

    Args:
        strategy: whose worker this is.
    """

    def __init__(self, strategy: ServerStrategy):
        self.strategy, self.model, self.place = strategy, strategy.model, strategy.place
        self.channel, self.client, self.replica = strategy.channel, strategy.channel.client, strategy.replica

    @abc.abstractmethod
    def step(self, update: Update) -> Outcome:
        """Take one step on the gradients in `model.grads`; decide when `update` runs."""

    def finish(self) -> None:
        """Complete what is under way, before a pause."""

    def entries(self) -> Iterable[Entry]:
        """Declare the worker's state, beside its parameters."""
        return ()

    def pause(self) -> None:
        """Push that no request of this period follows, and wait for the reply."""
        self.finish()
        self.client.push(PAUSE)
        self.client.wait()

    def stamps(self) -> dict[str, Any]:
        """Return what goes along with a request: clocks and numbers, as arguments of `Client.push`.

        The numbers are the hyper-parameters, and where every update is of the same batches how many of them no step has
        followed.
        """
        strategy = self.strategy
        values = strategy.hyperparameters.values() if strategy.sends_hyperparameters else []
        if strategy.contract.synchronous:
            values.append(float(self.model.passes.left_out))
        return {"clocks": self.replica.stamps(), "values": values}

    def left_out(self) -> str | None:
        """Return the event where this step's gradients are left out because they are not finite.

        Raises:
            NonFiniteError: they are not, and the run is to end then.
        """
        bad = self.strategy.gradients.nonfinite()
        return self.strategy.gradients.leave_out({self.place.rank: bad}) if bad else None


class GradientWorker(Worker):
    """Push the gradient with the clock of the parameters it was computed from, and take the parameters of the reply.

    Args:
        overlap: goes on at once, and takes the reply at the next step.

    Raises:
        ConfigError: `overlap` on servers that are workers too.
    """

    def __init__(self, strategy: ServerStrategy, *, overlap: bool = False):
        super().__init__(strategy)
        if overlap and self.place.colocated:
            raise ConfigError(
                "strategy.overlap must be false where strategy.servers is 'colocated', whose shards change only inside "
                "a step; got true. Leave it out, or give ranks of their own to the servers."
            )
        self._overlap = overlap
        self._clips = strategy.gradients.clip_norm is not None and strategy.update_clip is None
        self._compression = strategy.config.compression
        workers, first = strategy.roles.workers, self._compression.warmup_ranks
        sits_out = first is not None and workers.index(self.place.rank) >= first
        self._first_step = self._compression.warmup_steps if sits_out else 0  # after a warm-up of which others' are
        self._under_way = False  # a gradient whose reply has not been taken

    def step(self, update: Update) -> Outcome:
        strategy, passes = self.strategy, self.model.passes
        contributes = passes.contributes
        used, skipped = self.model.gradients.collect(), self.left_out()
        weight = passes.mean_weight if strategy.contract.weighs else 1.0
        if self._clips and not skipped:
            strategy.gradients.clip(weight)
        stamps = self.stamps()
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
            self.client.push(GRADIENT, **stamps)  # weight 0: it arrives, and counts for nothing
        heads: list[ReplyHead] = []
        if self._overlap:
            self._under_way = pushes
        else:
            heads = self.client.wait()
            self.replica.take(heads, self.channel.down.arrived)
        applied, clock = self.replica.take_applied(), self.replica.clock
        return Outcome(clock, applied, skipped or dropped, int(dropped is not None), waited_for(heads))

    def finish(self) -> None:
        if self._under_way:
            self.replica.take(self.client.wait(), self.channel.down.arrived)
            self._under_way = False
