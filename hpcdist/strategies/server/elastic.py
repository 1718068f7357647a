"""Tie workers to a centre on the servers by springs: elastic averaging, with and without momentum."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import torch
from pydantic import Field
from torch import Tensor

from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.server.channel import FETCH, NOBODY, Reply, ReplyHead, ServerRequest, waited_for
from hpcdist.strategies.server.loop import Handler
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
        exchanges = strategy.steps % self._period == 0
        self.model.gradients.collect()
        skipped, heads = self.left_out(), list[ReplyHead]()
        if exchanges:
            self.client.push(FETCH, tensors=self._motion.position(), **self.stamps())
            heads = self.client.wait()
        if not skipped:
            strategy.gradients.clip()
            self._motion.step(update)
        if exchanges:
            self._give_way(self.channel.down.arrived)
        return Outcome(strategy.steps + 1, strategy.gradients.staleness(skipped), skipped, waited_for=waited_for(heads))

    def _give_way(self, pulls: Sequence[Tensor]) -> None:
        """Subtract the pull from the model as from x, and from what the servers have of x."""
        with torch.no_grad():
            for own, pull in zip(self.model.params, pulls, strict=True):
                own.sub_(pull.to(own.device))
            if self.channel.up.coding is not None:
                for known, pull in zip(self.channel.up.coding.whole, pulls, strict=True):
                    known.sub_(pull)


class Centre(Handler):
    """Hold one shard of the centre c: reply to x with e = a(x − c), and add e, so that c gains what x loses.

    With `synchronous` a server waits for the requests of all workers that still take steps. All are pulled to the same
    old centre, which moves by the sum of their e, added in rank order: the order of arrival changes nothing.

    Compressed, a request says how x differs from x', which the server has of it, and e = C(a(x' − c)) is what the
    reply's message stands for. All of x, x' and c move by just that: c + Σx is conserved as without compression, and
    what C leaves out pulls again next time.
    """

    def __init__(self, strategy: ServerStrategy, config: ElasticConfig):
        self._config, self._loop, self._replica = config, strategy.loop, strategy.replica
        self._now, self._down, shard = strategy.comm.now, strategy.channel.down, strategy.place.shard
        self._strength = config.beta / len(strategy.roles.workers)  # a
        self._centre = strategy.state.sharded(
            "centre", shard.of(strategy.model.params), start="parameters", resets=True, ranges=shard.ranges
        )
        self._held: list[tuple[ServerRequest, float]] = []  # requests to be replied to together, and when they came

    def master(self) -> list[Tensor]:
        return self._centre

    def receive(self, request: ServerRequest) -> None:
        self._held.append((request, self._now()))
        self.settle()

    def settle(self) -> None:
        """Make the exchange that is due, with all workers whose requests are here."""
        sources = {request.source for request, _ in self._held}
        if not sources or (self._config.synchronous and not sources.issuperset(self._loop.active())):
            return
        last, _ = self._held[-1]
        moves: list[Tensor] = []
        for request, since_s in sorted(self._held, key=lambda held: held[0].source):
            pulled = self._pull(request, last, since_s)
            if moves:
                for move, pull in zip(moves, pulled, strict=True):
                    move.add_(pull)
            else:  # which is overwritten with the next reply
                moves = [pull.clone() for pull in pulled] if len(self._held) > 1 else list(pulled)
        self._held = []
        for centre, move in zip(self._centre, moves, strict=True):
            centre.add_(move.to(centre.device))
        self._loop.count_update()

    def _pull(self, request: ServerRequest, last: ServerRequest, since_s: float) -> Sequence[Tensor]:
        """Reply with e, from the centre as it is; return what of it has been sent."""
        ends = zip(request.tensors, self._centre, strict=True)
        pulls = [(x.to(c.device) - c).mul_(self._strength).to(c.dtype) for x, c in ends]
        waited = (NOBODY, 0.0) if request is last else (last.source, self._now() - since_s)
        self._loop.reply(Reply(request, self._replica.clock, pulls, *waited))
        sent = self._down.sent(request.source, pulls)
        if self._config.compression:  # else it lies in the worker's slot, which is the worker's again
            for known, pull in zip(request.tensors, sent, strict=True):
                known.sub_(pull)
        return sent


def tie_to_centre(strategy: ServerStrategy, config: ElasticConfig, motion: Callable[[], Motion]) -> None:
    """Compose a strategy whose workers move so, on springs to a centre."""
    strategy.compose(lambda: ElasticWorker(strategy, motion(), config.period), lambda: Centre(strategy, config))
