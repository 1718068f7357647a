"""Take a worker's steps: push gradients, and go on with the parameters of the reply."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Outcome, Strategy, Update
from hpcdist.strategies.common.state import Entry
from hpcdist.strategies.server.channel import GRADIENT, SUM, ReplyHead, waited_for
from hpcdist.strategies.server.placement import Placement


class Replica:
    """Take parameters from replies into the model, shard by shard; a shard that lies in the model already stays.

    Attributes:
        clock: updates of the parameters in the model; of the first shard's, where there are several.
        clocks: for each parent, updates of the parameters that have come from it.
    """

    def __init__(self, place: Placement, model: FlatModel):
        self._model = model
        others = [place.shards[parent] for parent in place.parents if parent != place.rank]
        self._whole = len(others) == len(place.parents)
        self._shards = [place.everything] if self._whole else others
        self.clock, self.clocks = 0, [0] * len(place.parents)

    def take(self, heads: Sequence[ReplyHead], arrived: Sequence[Tensor]) -> None:
        """Copy what has arrived from all parents into the model."""
        for shard in self._shards:
            own, new = self._model.params, arrived
            if not self._whole:
                own, new = shard.of(own), shard.of(new)
            for params, values in zip(own, new, strict=True):
                params.copy_(values)
        self.clocks = [head.clock for head in heads]
        self.clock = self.clocks[0]


class Worker(abc.ABC):
    """Take the steps of a worker.

    Args:
        strategy: a ServerStrategy, whose worker this is.
    """

    def __init__(self, strategy: Strategy):
        self.strategy, self.config, self.model = strategy, strategy.config, strategy.model
        self.rank, self.place, self.loop = strategy.comm.rank, strategy.place, strategy.loop
        self.channel, self.replica = strategy.channel, strategy.replica
        self.client = None if self.place.alone else self.channel.client

    @abc.abstractmethod
    def step(self, update: Update) -> Outcome:
        """Take one step on the gradients in `model.grads`; decide when `update` runs."""

    def finish(self) -> None:
        """Complete what is under way, before a pause."""

    def entries(self) -> Iterable[Entry]:
        """Declare the worker's state, beside its parameters."""
        return ()

    def collect(self) -> tuple[Tensor, str | None]:
        """Collect this step's gradients; return which parameters have one, and the event if they are left out.

        Raises:
            NonFiniteError: a gradient is not finite, and the run is to end then.
        """
        gradients = self.strategy.gradients
        used, bad = self.model.gradients.collect(), gradients.nonfinite()
        return used, gradients.leave_out({self.rank: bad}) if bad else None


class LoneWorker(Worker):
    """Run the local optimiser on the only rank, which has no server; the clock counts its updates."""

    def step(self, update: Update) -> Outcome:
        outcome = self.strategy.gradients.step_alone(update)
        self.replica.clock += outcome.event is None
        return replace(outcome, clock=self.replica.clock)


class GradientWorker(Worker):
    """Push the gradient with the clock of the parameters it was computed from, and take the parameters of the reply.

    Args:
        overlap: goes on at once, and takes the reply at the next step.

    Raises:
        ConfigError: `overlap` on servers that are workers too.
    """

    def __init__(self, strategy: Strategy, *, overlap: bool = False):
        super().__init__(strategy)
        if overlap and self.place.colocated:
            raise ConfigError(
                "strategy.overlap must be false where strategy.servers is 'colocated', whose shards change only inside "
                "a step; got true. Leave it out, or give ranks of their own to the servers."
            )
        self._overlap = overlap
        self._clips = strategy.gradients.clip_norm is not None and strategy.update_clip is None
        config, workers = strategy.config.compression, self.place.roles.workers
        sits_out = config.warmup_ranks is not None and workers.index(self.rank) >= config.warmup_ranks
        self._first_step = config.warmup_steps if sits_out else 0  # after a warm-up of which others' gradients are
        self._under_way = False  # a gradient whose reply has not been taken

    def step(self, update: Update) -> Outcome:
        strategy, passes = self.strategy, self.model.passes
        contributes = passes.contributes
        used, skipped = self.collect()
        weight = passes.mean_weight if strategy.contract.weighs else 1.0
        if self._clips and not skipped:
            strategy.gradients.clip(weight)
        stamps = strategy.stamps()
        if self._overlap:
            self.finish()
        dropped = None
        if strategy.steps < self._first_step and not skipped:
            ranks = self.config.compression.warmup_ranks
            dropped = f"dropped: a gradient of the warm-up, in which only {ranks} workers' count"
        pushes = contributes and not skipped and not dropped
        if pushes:
            self.client.push(SUM, **stamps, tensors=self.model.grads, used=used, weight=weight)
        elif not self._overlap:
            self.client.push(GRADIENT, **stamps)  # weight 0: it arrives, and counts for nothing
        heads = []
        if self._overlap:
            self._under_way = pushes
        else:
            heads = self.client.wait()
            self.replica.take(heads, self.channel.down.arrived)
        applied = self.loop.take_applied() if self.loop else ()
        return Outcome(strategy.clock, applied, skipped or dropped, int(dropped is not None), waited_for(heads))

    def finish(self) -> None:
        if self._under_way:
            self.replica.take(self.client.wait(), self.channel.down.arrived)
            self._under_way = False
