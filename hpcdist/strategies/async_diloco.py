"""Asynchronous DiLoCo: workers push the way of many local steps when they have it, and servers step along each."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Literal, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hpcdist.errors import ConfigError
from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.common.contract import Contract
from hpcdist.strategies.common.state import copy_all
from hpcdist.strategies.server.channel import GRADIENT, Reply, ServerRequest
from hpcdist.strategies.server.server import Server
from hpcdist.strategies.server.strategy import ServerStrategy, Worker


@final
class AsyncDiLoCo(ServerStrategy):
    """Run H local steps, push the way δ to the servers, and go on at once from what they have: nobody waits.

    A worker reads θ, takes its steps by its own, inner optimiser, and pushes δ, the way from its parameters to the θ
    that it has read. The servers apply pushes in order of arrival. By `rule` = delayed_nesterov a push moves θ at once,
    and the outer momentum once in N = `every` pushes: Δ ← Δ + δ; at each N-th push m ← βm + Δ/N, θ ← θ − ν[(1 − cN +
    c)βm + δ/N], Δ ← 0; at the others θ ← θ − ν[cβm + δ/N]. c = `spread` divides the momentum among the pushes. In this
    way stale ways don't add up to a momentum that is too large. The other rules are there to compare: nesterov steps
    along each δ/√p with momentum, discounted along δ/√p·(1 + staleness)^(−1/2), buffered once along the mean of N.

    With `dynamic` a worker's next period has H·s/max(s) steps, rounded down, at least 1, where s are the workers' steps
    per second in their last periods: so all push about equally often, and slow ones less. With `grace_s` the servers
    wait so long after a first push for others, apply them in order of their ranks, and let these workers begin at the
    same θ. The inner optimiser's state stays, or is made anew in each period (`inner_state`).

    Records have the staleness of pushes, once for each gradient in them: how many pushes the server has applied since
    the worker read θ. ν and N go together, as a push moves θ by ν/N of its way. A period may go over the end of an
    epoch. Each worker has its own samples of an epoch, as with all strategies, so none comes more often than others.
    A checkpoint has the servers' θ and each worker's own; all ranks load it together, so no worker has read a θ that
    is newer than the servers'. Evaluations use the servers' θ. On one rank the optimiser runs alone.

    Bytes per worker and period: one parameter vector each way. Memory: on a worker θ as it was read; on the servers θ,
    m, Δ, and a slot for each worker.

    Example on 4 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "async_diloco", period=4, outer_lr=0.7)

    Reference: Bo Liu, Rachita Chhaparia, Arthur Douillard, Satyen Kale, Andrei A. Rusu, Jiajun Shen, Arthur Szlam,
    Marc'Aurelio Ranzato, "Asynchronous local-SGD training for language modeling", 2024.
    """

    class Config(ServerStrategy.Config):
        """Options of async_diloco."""

        period: int = Field(50, ge=1, description="H: local steps to one push; with dynamic of the fastest worker")
        outer_lr: float = Field(0.7, gt=0, description="ν: learning rate of the servers")
        outer_momentum: float = Field(0.9, ge=0, lt=1, description="β: momentum of the servers")
        rule: Literal["delayed_nesterov", "nesterov", "discounted", "buffered"] = Field(
            "delayed_nesterov", description="how servers step along pushes"
        )
        every: int | None = Field(
            None, ge=1, description="N: pushes to one step of the momentum; none: the number of workers"
        )
        spread: float = Field(0.0, ge=0, description="c: part of the momentum at each push, at most 1/N")
        dynamic: bool = Field(False, description="fewer local steps on slower workers")
        grace_s: float = Field(0.0, ge=0, description="seconds that servers wait for more pushes after a first one")
        inner_state: Literal["keep", "reset"] = Field(
            "keep", description="what becomes of the local optimiser's state at the end of a period"
        )

        @model_validator(mode="after")
        def _rules_fit(self):
            if self.spread and self.rule != "delayed_nesterov":
                raise ValueError(
                    f"strategy.spread must be 0 with strategy.rule {self.rule}, whose momentum is not delayed; got "
                    f"{self.spread}. Leave it out, or take delayed_nesterov."
                )
            if self.grace_s and self.servers == "colocated":
                raise ValueError(
                    "strategy.grace_s must be 0 where strategy.servers is 'colocated', whose ranks wait for their own "
                    f"replies; got {self.grace_s}. Leave it out, or give ranks of their own to the servers."
                )
            return self

        def optimizer_ranks(self, size: int) -> tuple[int, ...]:
            return ()  # every worker has its own optimiser, and the servers a momentum

        def narrow(self, contract: Contract, size: int) -> Contract:
            return replace(super().narrow(contract, size), parameters="kept" if size == 1 else "replaced")

    contract = replace(ServerStrategy.contract, averages="parameters", updates="here", consensus="elsewhere")
    steps_on_workers = True
    config: Config

    def __init__(self, config: Config, comm, model, **kwargs):
        super().__init__(config, comm, model, **kwargs)
        workers = len(self.roles.workers)
        every = workers if config.every is None else config.every
        if config.spread * every > 1 + 1e-12:
            raise ConfigError(
                f"strategy.spread must be at most 1/{every}, that a momentum acts once; got {config.spread}. Take less."
            )
        self._speeds = comm.window(comm.size, torch.float64) if config.dynamic and comm.size > 1 else None
        self.compose(lambda: _PeriodWorker(self), lambda: _WayServer(self, every, workers))

    def speeds(self, own: float) -> list[float]:
        """Tell the first server this worker's speed, in steps per second, and return those of all that live."""
        found = torch.zeros(self.comm.size, dtype=torch.float64)
        if self._speeds is not None:
            server = self.roles.servers[0]
            self._speeds.put(torch.tensor([own], dtype=torch.float64), server, self.comm.rank)
            self._speeds.get(found, server)
            found[list(self.comm.failures.failed())] = 0.0
        return found.tolist()

    def close(self) -> None:
        if self._speeds is not None:
            self._speeds.close()
        super().close()


class _PeriodWorker(Worker):
    """Take a period of local steps, push their way, and take the servers' parameters."""

    def __init__(self, strategy: AsyncDiLoCo):
        super().__init__(strategy)
        self._of, self._config, state = strategy, strategy.config, strategy.state
        self._read = state.sharded("read", self.model.params, start="parameters", resets=True)  # θ as the period began
        self.done = state.value("done", 0, self, resets=True)  # steps of this period
        self.gradients = state.value("gradients", 0, self, resets=True)  # of its steps that counted
        self.steps = state.value("period", self._config.period, self, "steps")
        state.flags("used", strategy.gradients.used)
        strategy.records.pending = lambda: self.gradients
        self._timed, self._timed_s = 0, 0.0  # steps of this period, and how long they took
        self._since_s: float | None = None  # the end of the step before; None where a pause lies between

    def step(self, update: Update) -> Outcome:
        local, waited_for = self.strategy.gradients.step_alone(update), dict[int, float]()
        self.done += 1
        self.gradients += len(local.staleness)
        self._time()
        if self.done >= self.steps:
            waited_for = self._exchange()
            self._since_s = self.strategy.comm.now()
        return Outcome(self.replica.clock, event=local.event, waited_for=waited_for)

    def _exchange(self) -> dict[int, float]:
        """Push the way of this period, and begin the next one at what the servers have; return who was waited for."""
        config = self._config
        way = [before - own for before, own in zip(self._read, self.model.params, strict=True)]
        used = self.strategy.gradients.take_used() > 0
        self.client.push(GRADIENT, tensors=way, used=used, weight=float(self.gradients), **self.stamps())
        if config.dynamic:
            own = self._timed / self._timed_s if self._timed_s > 0 else 0.0
            fastest = max(self._of.speeds(own))
            self.steps = max(1, int(config.period * own / fastest + 1e-6)) if fastest > 0 else config.period
        waited_for = self.replica.pull().waited_for
        if self.place.colocated:  # this server's parameters lie beside its worker's model
            self.strategy.server.show()
        self.done, self.gradients = 0, 0
        copy_all(self._read, self.model.params)
        if config.inner_state == "reset" and self.strategy.optimizer is not None:
            self.strategy.optimizer.state.clear()
        return waited_for

    def _time(self) -> None:
        """Count a step with the time that it took, from the end of the one before."""
        now_s = self.strategy.comm.now()
        if self.done == 1:
            self._timed, self._timed_s = 0, 0.0
        if self._since_s is not None:
            self._timed, self._timed_s = self._timed + 1, self._timed_s + now_s - self._since_s
        self._since_s = now_s

    def finish(self) -> None:
        self._since_s = None


class _WayServer(Server):
    """Step along each way that comes, and reply with the parameters."""

    def __init__(self, strategy: AsyncDiLoCo, every: int, workers: int):
        super().__init__(strategy, strategy.replica, strategy.config.learner_deadline_s)
        self._shard, self._config = strategy.place.shard, strategy.config
        self._every, self._workers = every, workers
        state, ranges, like = strategy.state, self._shard.ranges, self._shard.of(strategy.model.params)
        # θ, m and Δ
        self._params = state.sharded("params", like, start="parameters", reshard="first", resets=True, ranges=ranges)
        self._momentum = state.sharded("momentum", like, reshard="first", ranges=ranges)
        self._sum = state.sharded("sum", like, ranges=ranges)
        self.count = state.value("count", 0, self)  # pushes since the last step of the momentum
        self._used = state.flags("pushed", torch.zeros(len(strategy.model.slots), dtype=torch.bool))  # in any of them

    def master(self) -> list[Tensor]:
        return self._params

    def apply_due(self) -> None:
        """Apply what is held once the time is over, or no other worker is left to wait for."""
        held = sorted(self.held, key=attrgetter("source"))  # the same sums in any order of arrival
        if not held:
            return
        self.due_s = self.held[0].since_s + self._config.grace_s
        if self.due_s <= self.comm.now() or {request.source for request in held}.issuperset(self.active()):
            self.held, self.due_s = [], None
            for request in held:
                self._apply(request)
            for request in held:
                values = [new.to(own.dtype) for new, own in zip(self._params, self.model.params)]
                self.inbox.reply(Reply(request, self.replica.clock, values))

    def _apply(self, request: ServerRequest) -> None:
        """Step along one push."""
        ways = [way.to(part.device, part.dtype) for way, part in zip(request.tensors, self._params, strict=True)]
        staleness = self.replica.clock - request.clocks[0]
        self.count += 1
        ends = self.count == self._every
        self._used |= request.used
        alone = self._config.rule in ("nesterov", "discounted")
        used = request.used if alone else self._used
        with self.model.skip_unused(used, self._momentum, self._shard.ranges):
            for x, momentum, total, way in zip(self._params, self._momentum, self._sum, ways, strict=True):
                self._step(x, momentum, total, way, staleness, ends)
        if ends:
            self.count = 0
            self._used.zero_()
        self.count_update([staleness] * int(request.weight))  # of each gradient in it

    def _step(self, x: Tensor, momentum: Tensor, total: Tensor, way: Tensor, staleness: int, ends: bool) -> None:
        config, n = self._config, self._every
        beta, spread, rule = config.outer_momentum, config.spread, config.rule
        if rule in ("nesterov", "discounted"):
            scale = self._workers**-0.5 * ((1 + staleness) ** -0.5 if rule == "discounted" else 1.0)
            gradient = way * scale
            momentum.mul_(beta).add_(gradient)
            x.add_(gradient.add(momentum, alpha=beta), alpha=-config.outer_lr)
            return
        total.add_(way)
        if ends:
            momentum.mul_(beta).add_(total, alpha=1 / n)
        if rule == "buffered":
            if ends:
                x.add_((total / n).add_(momentum, alpha=beta), alpha=-config.outer_lr)
        else:
            share = beta * (1 - spread * n + spread if ends else spread)
            x.add_((way / n).add_(momentum, alpha=share), alpha=-config.outer_lr)
        if ends:
            total.zero_()
