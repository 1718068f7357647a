"""Asynchronous DiLoCo: workers push the change of many local steps to servers, which apply each push as it arrives."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any, Literal, final

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.config.settings import Field, joint_rule
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Contract, Outcome, Update
from hpcdist.strategies.common.state import copy_all
from hpcdist.strategies.server.channel import GRADIENT, Reply, ServerRequest
from hpcdist.strategies.server.server import Server
from hpcdist.strategies.server.strategy import ServerStrategy, Worker


class _PeriodWorker(Worker):
    """Take a period of local steps, push their change, and read the servers' parameters."""

    def __init__(self, strategy: AsyncDiLoCo):
        super().__init__(strategy)
        self._of, self._config, state = strategy, strategy.config, strategy.state
        # θ at the start of the period.
        self._read = state.sharded("read", self.model.params, start="parameters", resets=True)
        self.done = state.value("done", 0, self, resets=True)  # steps of this period
        self.gradients = state.value("gradients", 0, self, resets=True)  # number of gradients in this period
        self.steps = state.value("period", self._config.period, self, "steps")
        state.flags("used", strategy.gradients.used)
        strategy.records.pending = lambda: self.gradients
        self._timed, self._timed_s = 0, 0.0  # timed steps of this period, and their seconds
        self._since_s: float | None = None  # end of the last step; None after a pause

    def step(self, update: Update) -> Outcome:
        local, waited_for = self.strategy.gradients.step_alone(update), dict[int, float]()
        self.done += 1
        self.gradients += len(local.staleness)
        self._time()
        if self.done >= (self.steps if self._config.dynamic else self._config.period):
            waited_for = self._exchange()
            self._since_s = self.strategy.comm.now()
        return Outcome(self.replica.clock, event=local.event, waited_for=waited_for)

    def _exchange(self) -> dict[int, float]:
        """Push this period's change, and start the next period from the servers' θ; return waiting times by rank."""
        config = self._config
        delta = [start - local for start, local in zip(self._read, self.model.params, strict=True)]
        used = self.strategy.gradients.take_used() > 0
        self.client.push(GRADIENT, tensors=delta, used=used, weight=float(self.gradients), **self.stamps())
        if config.dynamic:
            speed = self._timed / self._timed_s if self._timed_s > 0 else 0.0
            fastest = max(self._of.speeds(speed))
            self.steps = max(1, int(config.period * speed / fastest + 1e-6)) if fastest > 0 else config.period
        waited_for = self.pull().waited_for
        self.done, self.gradients = 0, 0
        copy_all(self._read, self.model.params)
        if config.inner_state == "reset" and self.strategy.optimizer is not None:
            self.strategy.optimizer.state.clear()
        return waited_for

    def _time(self) -> None:
        """Count a step, and its time since the end of the last step."""
        now_s = self.strategy.comm.now()
        if self.done == 1:
            self._timed, self._timed_s = 0, 0.0
        if self._since_s is not None:
            self._timed, self._timed_s = self._timed + 1, self._timed_s + now_s - self._since_s
        self._since_s = now_s

    def finish(self) -> None:
        self._since_s = None


class _DeltaServer(Server):
    """Apply each push by the rule, and reply with the parameters."""

    def __init__(self, strategy: AsyncDiLoCo):
        super().__init__(strategy)
        self._shard, self._config = strategy.replica.shard, strategy.config
        self._every, self._workers = strategy.pushes_per_momentum, len(strategy.roles.workers)
        state, ranges, like = strategy.state, self._shard.ranges, self._shard.of(strategy.model.params)
        # θ, m and Δ of the shard.
        self._params = state.sharded("params", like, start="parameters", reshard="first", resets=True, ranges=ranges)
        self._momentum = state.sharded("momentum", like, reshard="first", ranges=ranges)
        self._sum = state.sharded("sum", like, ranges=ranges)
        self.count = state.value("count", 0, self)  # pushes since the last step of the momentum
        self._used = state.flags("pushed", torch.zeros(len(strategy.model.slots), dtype=torch.bool))  # in any of them

    def master(self) -> list[Tensor]:
        return self._params

    def apply_due(self) -> None:
        """Apply waiting pushes after `grace_s`, or if no other worker is active."""
        waiting = sorted(self.waiting, key=attrgetter("source"))  # the same sums in any order of arrival
        if not waiting:
            return
        self.due_s = self.waiting[0].since_s + self._config.grace_s
        if self.due_s <= self.comm.now() or {request.source for request in waiting}.issuperset(self.active()):
            self.waiting, self.due_s = [], None
            for request in waiting:
                self._apply(request)
            for request in waiting:
                values = [new.to(param.dtype) for new, param in zip(self._params, self.model.params)]
                self.inbox.reply(Reply(request, self.replica.clock, values))

    def _apply(self, request: ServerRequest) -> None:
        """Apply one push."""
        deltas = [delta.to(part.device, part.dtype) for delta, part in zip(request.tensors, self._params, strict=True)]
        staleness = self.replica.clock - request.clocks[0]
        self.count += 1
        ends = self.count == self._every
        self._used |= request.used
        momentum_each_time = self._config.rule in ("nesterov", "discounted")
        used = request.used if momentum_each_time else self._used
        with self.model.skip_unused(used, self._momentum, self._shard.ranges):
            for x, momentum, total, delta in zip(self._params, self._momentum, self._sum, deltas, strict=True):
                self._step(x, momentum, total, delta, staleness, ends)
        if ends:
            self.count = 0
            self._used.zero_()
        self.count_update([staleness] * int(request.weight))  # of each gradient in it

    def _step(self, x: Tensor, momentum: Tensor, total: Tensor, delta: Tensor, staleness: int, ends: bool) -> None:
        """Update a part of θ, m and Δ by a push δ; `ends`: it is the last of N."""
        config, n = self._config, self._every
        beta, spread, rule = config.outer_momentum, config.spread, config.rule
        if rule in ("nesterov", "discounted"):
            scale = self._workers**-0.5 * ((1 + staleness) ** -0.5 if rule == "discounted" else 1.0)
            gradient = delta * scale
            momentum.mul_(beta).add_(gradient)
            x.add_(gradient.add(momentum, alpha=beta), alpha=-config.outer_lr)
            return
        total.add_(delta)
        if ends:
            momentum.mul_(beta).add_(total, alpha=1 / n)
        if rule == "buffered":
            if ends:
                x.add_((total / n).add_(momentum, alpha=beta), alpha=-config.outer_lr)
        else:
            share = beta * (1 - spread * n + spread if ends else spread)
            x.add_((delta / n).add_(momentum, alpha=share), alpha=-config.outer_lr)
        if ends:
            total.zero_()


@final
class AsyncDiLoCo(ServerStrategy):
    """Run H local steps, push the change δ to the servers, and continue from their parameters; no worker waits.

    A worker reads θ, takes H steps with its inner optimiser, and pushes δ, the θ that it has read minus its parameters.
    The servers apply pushes in order of arrival. With `rule` = delayed_nesterov a push moves θ immediately, and the
    outer momentum is updated once in N = `every` pushes: Δ ← Δ + δ; at each N-th push m ← βm + Δ/N,
    θ ← θ − ν[(1 − cN + c)βm + δ/N], Δ ← 0; at the others θ ← θ − ν[cβm + δ/N]. c = `spread` divides the momentum among
    the pushes. So stale changes don't add up to a momentum that is too large. Other rules, for comparison: nesterov
    steps along each δ/√p with momentum, discounted along δ/√p·(1 + staleness)^(−1/2), buffered once along the mean of
    N.

    With `dynamic` a worker's next period has H·s/max(s) steps, rounded down, at least 1, where s are the workers' steps
    per second in their last periods: so all workers push about equally often. With `grace_s` the servers wait this long
    after a first push for others, apply them in rank order, and reply with the same θ. The inner optimiser's state is
    kept, or reset in each period (`inner_state`).

    Records have the staleness of pushes, once for each gradient: the number of pushes that the server has applied since
    the worker read θ. Choose ν and N jointly, as a push moves θ by ν/N of its change. A period may extend over the end
    of an epoch. Samples are divided among workers as with all strategies, so a fast worker's samples are not used more
    often. A checkpoint has the servers' θ and each worker's. Evaluations use the servers' θ. On one rank only the
    optimiser runs.

    Bytes per worker and period: one parameter vector in each direction. Memory: on a worker the θ that it has read; on
    the servers θ, m, Δ, and a slot for each worker.

    Example on 4 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "async_diloco", period=4, outer_lr=0.7)

    Reference: Bo Liu, Rachita Chhaparia, Arthur Douillard, Satyen Kale, Andrei A. Rusu, Jiajun Shen, Arthur Szlam,
    Marc'Aurelio Ranzato, "Asynchronous local-SGD training for language modeling", 2024.
    """

    class Config(ServerStrategy.Config):
        period: int = Field(50, "H: local steps to one push; with dynamic of the fastest worker", ge=1)
        outer_lr: float = Field(0.7, "ν: learning rate of the servers", gt=0)
        outer_momentum: float = Field(0.9, "β: momentum of the servers", ge=0, lt=1)
        rule: Literal["delayed_nesterov", "nesterov", "discounted", "buffered"] = Field(
            "delayed_nesterov", "rule by which servers apply pushes"
        )
        every: int | None = Field(None, "N: pushes to one step of the momentum; none: the number of workers", ge=1)
        spread: float = Field(0.0, "c: part of the momentum at each push, at most 1/N", ge=0)
        dynamic: bool = Field(False, "fewer local steps on slower workers")
        grace_s: float = Field(0.0, "seconds that servers wait for more pushes after a first one", ge=0)
        inner_state: Literal["keep", "reset"] = Field(
            "keep", "keep or reset the local optimiser's state at the end of a period"
        )

        @joint_rule
        def _rules_fit(self) -> None:
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

        def optimizer_ranks(self, size: int) -> tuple[int, ...]:
            return ()  # every worker has a local optimiser, and the servers a momentum

        def narrow(self, contract: Contract, size: int) -> Contract:
            return replace(super().narrow(contract, size), parameters="kept" if size == 1 else "replaced")

    contract = replace(ServerStrategy.contract, averages="parameters", updates="here", consensus="elsewhere")
    worker_type, server_type = _PeriodWorker, _DeltaServer
    steps_on_workers = True
    config: Config

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any) -> None:
        super().__init__(config, comm, model, **kwargs)
        every = self.pushes_per_momentum
        if config.spread * every > 1 + 1e-12:
            raise ConfigError(
                f"strategy.spread must be at most 1/{every}, that a momentum acts once; got {config.spread}. Take less."
            )
        timed = config.dynamic and comm.size > 1
        self._speeds = self.opened(comm.window(comm.size, torch.float64)) if timed else None

    @property
    def pushes_per_momentum(self) -> int:
        """N: pushes to one step of the momentum."""
        return self.config.every or len(self.roles.workers)

    def speeds(self, local_speed: float) -> list[float]:
        """Send this worker's speed, in steps per second, to the first server; return all ranks', 0 for failed ones."""
        all_speeds = torch.zeros(self.comm.size, dtype=torch.float64)
        if self._speeds is not None:
            server = self.roles.servers[0]
            self._speeds.put(torch.tensor([local_speed], dtype=torch.float64), server, self.comm.rank)
            self._speeds.get(all_speeds, server)
            all_speeds[list(self.comm.failures.failed())] = 0.0
        return all_speeds.tolist()
