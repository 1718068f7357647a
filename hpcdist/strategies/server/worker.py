"""Take a worker's steps: push gradients, and go on with the parameters of the reply."""

from __future__ import annotations

from hpcdist.errors import ConfigError
from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.server.channel import GRADIENT, SUM, ReplyHead, waited_for
from hpcdist.strategies.server.strategy import ServerStrategy, Worker


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
        strategy, gradients = self.strategy, self.model.gradients
        contributes = gradients.contributes
        used, skipped = gradients.collect(), self.left_out()
        weight = gradients.mean_weight if gradients.weighs else 1.0
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
