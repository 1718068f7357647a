"""Elastic averaging: workers and a centre on the servers pull each other, with and without momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import ClassVar

import torch
from torch import Tensor

from hpcdist.config.settings import Field
from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.server.channel import FETCH, NOBODY, Reply, ServerRequest
from hpcdist.strategies.server.server import Server
from hpcdist.strategies.server.strategy import ServerStrategy, Worker


class ElasticWorker(Worker):
    """Push x every `period` steps, and subtract the pull in the reply; the gradient step starts from the old x."""

    strategy: ElasticStrategy

    def position(self) -> Sequence[Tensor]:
        """Return x, the position that the centre pulls: flat tensors like the model's parameters, or these."""
        return self.model.params

    def move(self, update: Update) -> None:
        """Take the worker's step on its gradient, in addition to the centre's pull."""
        update()

    def step(self, update: Update) -> Outcome:
        strategy = self.strategy
        exchanges, waited_for = strategy.steps % strategy.config.period == 0, dict[int, float]()
        if exchanges:
            self.client.push(FETCH, tensors=self.position(), **self.stamps())
            waited_for = self.client.wait().waited_for
        outcome = strategy.gradients.step_alone(lambda: self.move(update))
        if exchanges:
            self._apply_pull(self.channel.down.whole)
        return replace(outcome, waited_for=waited_for)

    def _apply_pull(self, pulls: Sequence[Tensor]) -> None:
        """Subtract the pull from the model, and from the servers' copy of x."""
        with torch.no_grad():
            for local, pull in zip(self.model.params, pulls, strict=True):
                local.sub_(pull.to(local.device))
            if self.strategy.config.compression:
                for known, pull in zip(self.channel.up.whole, pulls, strict=True):
                    known.sub_(pull)


class Centre(Server):
    """Hold one shard of the centre c: reply to x with e = a(x − c), and add e, so that c gains what x loses.

    With `synchronous` a server waits for the requests of all active workers. All are pulled to the same old centre,
    which moves by the sum of their e, added in rank order, independent of the order of arrival.

    With a compressor C, a request contains the difference of x to the server's copy x', and e = C(a(x' − c)) is the
    decoded reply. x, x' and c all move by e: c + Σx is conserved as without compression, and the error of C is part of
    the next pull.
    """

    def __init__(self, strategy: ElasticStrategy):
        super().__init__(strategy)
        self._config, shard = strategy.config, strategy.replica.shard
        self._strength = strategy.config.beta / len(strategy.roles.workers)  # a
        self._centre = strategy.state.sharded(
            "centre", shard.of(strategy.model.params), start="parameters", resets=True, ranges=shard.ranges
        )

    def master(self) -> list[Tensor]:
        return self._centre

    def apply_due(self) -> None:
        """Exchange with all workers whose requests have arrived, if an exchange is due."""
        sources = {request.source for request in self.waiting}
        if not sources or (self._config.synchronous and not sources.issuperset(self.active())):
            return
        waiting, self.waiting = self.waiting, []
        moves: list[Tensor] = []
        for request in sorted(waiting, key=attrgetter("source")):
            pulled = self._pull(request, waiting[-1])
            if moves:
                for move, pull in zip(moves, pulled, strict=True):
                    move.add_(pull)
            else:  # a copy, because the next reply overwrites `pulled`
                moves = [pull.clone() for pull in pulled] if len(waiting) > 1 else list(pulled)
        for centre, move in zip(self._centre, moves, strict=True):
            centre.add_(move.to(centre.device))
        self.count_update()

    def _pull(self, request: ServerRequest, last: ServerRequest) -> Sequence[Tensor]:
        """Reply with e, from the current centre; return e as the worker decodes it. `last` arrived last."""
        ends = zip(request.tensors, self._centre, strict=True)
        pulls = [(x.to(c.device) - c).mul_(self._strength).to(c.dtype) for x, c in ends]
        waited = (NOBODY, 0.0) if request is last else (last.source, self.comm.now() - request.since_s)
        self.inbox.reply(Reply(request, self.replica.clock, pulls, *waited))
        sent = self.channel.down.sent(request.source, pulls)
        if self._config.compression:  # else the tensors are the worker's slot, which it may overwrite now
            for known, pull in zip(request.tensors, sent, strict=True):
                known.sub_(pull)
        return sent


class ElasticStrategy(ServerStrategy):
    """Base of strategies whose workers and a centre on the servers pull each other."""

    class Config(ServerStrategy.Config):
        period: int = Field(4, "steps of a worker between two exchanges with the centre", ge=1)
        beta: float = Field(
            0.9, "p * a for p workers: strength of the pull between each worker and the centre", ge=0, lt=2
        )
        synchronous: bool = Field(False, "all workers exchange at the same time; each waits for the slowest")

        def optimizer_ranks(self, size: int) -> tuple[int, ...]:
            return ()  # every worker has a local optimiser, and the centre has none

    up, down = "values", "moves"
    contract = replace(
        ServerStrategy.contract, averages="parameters", updates="here", parameters="kept", consensus="elsewhere"
    )
    steps_on_workers = True
    worker_type: ClassVar[type[Worker]] = ElasticWorker
    server_type = Centre
    config: Config
