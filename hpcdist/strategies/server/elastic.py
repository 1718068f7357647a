"""Tie workers to a centre on the servers by springs: elastic averaging, with and without momentum."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter

import torch
from pydantic import Field
from torch import Tensor

from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.server.channel import FETCH, NOBODY, Reply, ServerRequest
from hpcdist.strategies.server.server import Server
from hpcdist.strategies.server.strategy import ServerStrategy, Worker


class ElasticConfig(ServerStrategy.Config):
    """Options of elastic averaging."""

    period: int = Field(4, ge=1, description="steps of a worker between two exchanges with the centre")
    beta: float = Field(
        0.9, ge=0, lt=2, description="p * a for p workers: how strongly each worker and the centre pull each other"
    )
    synchronous: bool = Field(False, description="all workers exchange at the same time; each waits for the slowest")

    def optimizer_ranks(self, size: int) -> tuple[int, ...]:
        return ()  # every worker has its own optimiser, and the centre has none


class Motion(abc.ABC):
    """Move a worker by steps of its own, between and beside the pulls of its spring."""

    @abc.abstractmethod
    def position(self) -> Sequence[Tensor]:
        """Return x, the end of the worker's spring: flat tensors like the model's parameters."""

    @abc.abstractmethod
    def step(self, update: Update) -> None:
        """Take the worker's own step on its gradient."""


class ElasticWorker(Worker):
    """Push x every `period` steps, and subtract the pull of the reply; the own step is the one from the old x."""

    def __init__(self, strategy: ServerStrategy, motion: Motion, period: int):
        super().__init__(strategy)
        self._motion, self._period = motion, period

    def step(self, update: Update) -> Outcome:
        strategy = self.strategy
        exchanges, waited_for = strategy.steps % self._period == 0, dict[int, float]()
        if exchanges:
            self.client.push(FETCH, tensors=self._motion.position(), **self.stamps())
            waited_for = self.client.wait().waited_for
        outcome = strategy.gradients.step_alone(lambda: self._motion.step(update))
        if exchanges:
            self._give_way(self.channel.down.whole)
        return replace(outcome, waited_for=waited_for)

    def _give_way(self, pulls: Sequence[Tensor]) -> None:
        """Subtract the pull from the model as from x, and from what the servers have of x."""
        with torch.no_grad():
            for own, pull in zip(self.model.params, pulls, strict=True):
                own.sub_(pull.to(own.device))
            if self.strategy.config.compression:
                for known, pull in zip(self.channel.up.whole, pulls, strict=True):
                    known.sub_(pull)


class Centre(Server):
    """Hold one shard of the centre c: reply to x with e = a(x − c), and add e, so that c gains what x loses.

    With `synchronous` a server waits for the requests of all workers that still take steps. All are pulled to the same
    old centre, which moves by the sum of their e, added in rank order: the order of arrival changes nothing.

    Compressed, a request says how x differs from x', which the server has of it, and e = C(a(x' − c)) is what the
    reply's message stands for. All of x, x' and c move by just that: c + Σx is conserved as without compression, and
    what C leaves out pulls again next time.
    """

    def __init__(self, strategy: ServerStrategy, config: ElasticConfig):
        super().__init__(strategy, strategy.replica, config.learner_deadline_s)
        self._config, shard = config, strategy.place.shard
        self._strength = config.beta / len(strategy.roles.workers)  # a
        self._centre = strategy.state.sharded(
            "centre", shard.of(strategy.model.params), start="parameters", resets=True, ranges=shard.ranges
        )

    def master(self) -> list[Tensor]:
        return self._centre

    def apply_due(self) -> None:
        """Make the exchange that is due, with all workers whose requests are here."""
        sources = {request.source for request in self.held}
        if not sources or (self._config.synchronous and not sources.issuperset(self.active())):
            return
        held, self.held = self.held, []
        moves: list[Tensor] = []
        for request in sorted(held, key=attrgetter("source")):
            pulled = self._pull(request, held[-1])
            if moves:
                for move, pull in zip(moves, pulled, strict=True):
                    move.add_(pull)
            else:  # which is overwritten with the next reply
                moves = [pull.clone() for pull in pulled] if len(held) > 1 else list(pulled)
        for centre, move in zip(self._centre, moves, strict=True):
            centre.add_(move.to(centre.device))
        self.count_update()

    def _pull(self, request: ServerRequest, last: ServerRequest) -> Sequence[Tensor]:
        """Reply with e, from the centre as it is; return what of it has been sent."""
        ends = zip(request.tensors, self._centre, strict=True)
        pulls = [(x.to(c.device) - c).mul_(self._strength).to(c.dtype) for x, c in ends]
        waited = (NOBODY, 0.0) if request is last else (last.source, self.comm.now() - request.since_s)
        self.inbox.reply(Reply(request, self.replica.clock, pulls, *waited))
        sent = self.channel.down.sent(request.source, pulls)
        if self._config.compression:  # else it lies in the worker's slot, which is the worker's again
            for known, pull in zip(request.tensors, sent, strict=True):
                known.sub_(pull)
        return sent


def tie_to_centre(strategy: ServerStrategy, config: ElasticConfig, motion: Callable[[], Motion]) -> None:
    """Compose a strategy whose workers move so, on springs to a centre."""
    strategy.compose(lambda: ElasticWorker(strategy, motion(), config.period), lambda: Centre(strategy, config))
