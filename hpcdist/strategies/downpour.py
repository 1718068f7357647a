"""Local steps, with pushes of gradients and fetches of parameters every few steps, and Adagrad on servers: Downpour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, final

import torch
from torch import Tensor

from hpcdist.config.settings import Field, joint_rule
from hpcdist.model.optimizer_state import groups
from hpcdist.strategies.base import Contract, Outcome, Update
from hpcdist.strategies.common.state import zero_all
from hpcdist.strategies.server.channel import FETCH, GRADIENT, PUSH, Reply, ServerRequest
from hpcdist.strategies.server.gradients import Aggregate
from hpcdist.strategies.server.server import Server
from hpcdist.strategies.server.strategy import ServerStrategy, Worker


class ShardAdagrad:
    """Adagrad on a shard: the learning rate of an element is γ/√Σg², times the workers' relative learning rate.

    Args:
        strategy: the strategy, whose workers may follow a learning rate schedule.
        rate: γ.

    Attributes:
        params: the shard, one flat tensor per group, in separate memory.
    """

    def __init__(self, strategy: ServerStrategy, rate: float):
        self._rate, shard, state = rate, strategy.replica.shard, strategy.state
        group = {} if strategy.optimizer is None else strategy.optimizer.param_groups[0]
        rates = (group.get(name) for name in ("max_lr", "initial_lr", "lr"))  # before any schedule, or its largest
        self._first_rate = float(next((known for known in rates if known is not None), 0.0))
        self._hyperparameters = strategy.hyperparameters
        # In float32 at least: in float16 Adagrad's eps is 0, and in bfloat16 a sum soon stops growing.
        self._parameters = [
            torch.nn.Parameter(part.to(torch.promote_types(part.dtype, torch.float32), copy=True))
            for part in shard.of(strategy.model.params)
        ]
        self._adagrad = torch.optim.Adagrad(self._parameters, lr=rate)
        self.params = state.sharded(
            "params", tensors=[parameter.detach() for parameter in self._parameters], start="parameters",
            reshard="first", resets=True, ranges=shard.ranges, optional=True,
        )  # fmt: skip
        squares = [self._adagrad.state[parameter]["sum"] for parameter in self._parameters]
        state.sharded("squares", tensors=squares, reshard="first", ranges=shard.ranges, optional=True)

    def step(self, gradients: Iterable[Tensor], values: Sequence[float]) -> None:
        """Take one step, with the relative learning rate in a worker's hyper-parameters `values`."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.device, parameter.dtype)
        self._adagrad.param_groups[0]["lr"] = self._rate * self._relative_rate(values)
        self._adagrad.step()

    def _relative_rate(self, values: Sequence[float]) -> float:
        """Return a worker's learning rate divided by its initial one; 1 without a schedule."""
        if not values or "lr" not in (names := self._hyperparameters.names()):
            return 1.0
        rate = values[names.index("lr")]
        return rate / self._first_rate if self._first_rate else float(rate > 0)  # none is known: on or off


class _Worker(Worker):
    """Take local steps, and push the sum of their gradients every `n_push` steps."""

    def __init__(self, strategy: Downpour):
        super().__init__(strategy)
        self._sum = strategy.state.sharded("sum", self.model.grads)
        self._used = strategy.state.flags("used", torch.zeros(len(self.model.slots), dtype=torch.bool), False)
        self._config = strategy.config
        first = self.strategy.comm.rank == self.strategy.roles.workers[0]
        self._starts_late = self._config.warm_start > 0 and not first

    def step(self, update: Update) -> Outcome:
        strategy, config = self.strategy, self._config
        if self._starts_late and strategy.steps == 0:
            return self._start_late()
        used, skipped = self.model.gradients.collect(), strategy.gradients.skipped()
        if not skipped:
            strategy.gradients.clip()
            for total, grad in zip(self._sum, self.model.grads, strict=True):
                total.add_(grad)
            if config.server_rule == "adagrad":  # which minimises
                for slot, group in zip(self.model.slots, groups(self.model, strategy.optimizer), strict=True):
                    if group and group.get("maximize"):
                        slot.view(self._sum).sub_(slot.view(self.model.grads), alpha=2)
            self._used |= used
        fetches = (strategy.steps + 1) % config.n_fetch == 0
        pushes = (strategy.steps + 1) % config.n_push == 0 and bool(self._used.any())
        if pushes:
            self._request(GRADIENT if fetches else PUSH, tensors=self._sum, used=self._used, weight=1.0)
            zero_all((*self._sum, self._used))  # a new sum
        elif fetches:
            self._request(FETCH)
        if not skipped:
            self.model.gradients.release(used)
            update()
        if fetches:
            self.pull()
        return Outcome(self.replica.clock, event=skipped)

    def finish(self) -> None:
        self.client.wait()  # for the reply to a push: the pause needs its slot

    def _start_late(self) -> Outcome:
        """Drop the first gradient, and start from the parameters after the warm start."""
        self.strategy.gradients.nonfinite()  # for its checksum, and because it is collective over stages
        self._request(FETCH)
        self.pull()
        return Outcome(self.replica.clock, event="dropped: the gradient of before the warm start", dropped=1)

    def _request(self, kind: int, **whole: Any) -> None:
        """Push a request, once the last request has its reply."""
        self.client.wait()
        self.client.push(kind, **self.stamps(), **whole)


class _Server(Server):
    """Apply pushes one at a time, and reply to fetches with the current parameters."""

    def __init__(self, strategy: Downpour):
        super().__init__(strategy)
        config = strategy.config
        self._warm_start, self._leader = config.warm_start, strategy.roles.workers[0]
        self._rule: ShardAdagrad | Aggregate  # the latter for the job's optimiser
        if config.server_rule == "optimizer":
            self._rule = Aggregate(self.model, self.replica.shard, apart=False)
        else:
            self._rule = ShardAdagrad(strategy, config.rate)

    def master(self) -> Sequence[Tensor]:
        return self._rule.params if isinstance(self._rule, ShardAdagrad) else super().master()

    def apply_due(self) -> None:
        """Handle waiting requests; requests of other workers than the first after the warm start."""

        def due() -> ServerRequest | None:
            all_go = self.replica.clock >= self._warm_start or self._leader not in self.active()
            return next((r for r in self.waiting if all_go or r.source == self._leader), None)

        while (request := due()) is not None:
            self.waiting.remove(request)
            if request.kind != FETCH:
                self._apply(request)
            parameters = () if request.kind == PUSH else self.master()
            rounded = [new.to(param.dtype) for new, param in zip(parameters, self.model.params)]
            self.inbox.reply(Reply(request, self.replica.clock, rounded))

    def _apply(self, request: ServerRequest) -> None:
        """Update the shard with a push."""
        staleness, values = self.replica.clock - request.clocks[0], request.values.tolist()
        if isinstance(self._rule, ShardAdagrad):
            self._rule.step(request.tensors, values)
        else:
            self.strategy.hyperparameters.set(values)
            self._rule.add(request)
            self._rule.apply(self.strategy.hyperparameters.track_counters(self.update), 1.0)
        self.count_update([staleness])


@final
class Downpour(ServerStrategy):
    """Step locally, push the sum of the gradients every `n_push` steps, and fetch parameters every `n_fetch`.

    A worker's step: add the gradient to the sum, run the local optimiser; every `n_push` steps put the sum into its
    slot on the servers; every `n_fetch` steps replace the parameters by the servers'. Each server applies pushes to its
    shard, one at a time, with Adagrad: the learning rate of an element is γ/√Σg² over all pushes so far; shards are
    independent. With `server_rule = "optimizer"` the servers run the job's optimiser instead; then
    `n_push = n_fetch = 1` is `parameter_server`, to the bit for the same order of arrival.

    A schedule in the loop changes the server's learning rate too: γ is `rate` times the worker's learning rate divided
    by its initial one (`initial_lr`, or the schedule's `max_lr`); the job's optimiser gets the worker's
    hyper-parameters. Gradients are clipped before they are added to the sum.

    Only the first worker sends the first `warm_start` pushes: each other worker drops its first gradient and starts
    from the parameters after the warm start. The end of an epoch or a checkpoint ends the warm start early. Gradients
    in a worker's sum at the end of an epoch stay for the next epoch.

    Records have the staleness of pushes: the server's clock when a push is applied minus the clock of the worker's last
    fetched parameters. Bytes per worker: one gradient vector per push, one parameter vector per fetch.

    For a model in half precision the servers keep parameters and Σg² in float32, and reply with rounded parameters.

    Example on 3 ranks:
        >>> optimizer = hd.DistributedOptimizer(sgd, model, "downpour", n_push=2, n_fetch=2)

    Reference: Jeffrey Dean et al., "Large scale distributed deep networks", 2012, section 4.1; the worker's loop is
    algorithm 7.1 of its appendix. Adagrad: John Duchi, Elad Hazan, Yoram Singer, 2011.
    """

    class Config(ServerStrategy.Config):
        n_fetch: int = Field(1, "steps of a worker between two fetches of parameters", ge=1)
        n_push: int = Field(1, "steps of a worker between two pushes of gradients", ge=1)
        server_rule: Literal["adagrad", "optimizer"] = Field(
            "adagrad", "optimiser of the server: Adagrad, or the job's optimiser"
        )
        rate: float = Field(0.05, "γ, learning rate of the server's Adagrad", gt=0)
        warm_start: int = Field(0, "number of pushes that the first worker makes before the others start", ge=0)

        @joint_rule
        def _shards_have_a_rule_of_their_own(self) -> None:
            if self.servers == "colocated" and self.server_rule == "optimizer":
                raise ValueError(
                    "must be 'adagrad' where strategy.servers is 'colocated': the job's own optimiser takes the "
                    "worker's local steps there; got server_rule 'optimizer'."
                )

        def optimizer_ranks(self, size: int) -> tuple[int, ...]:
            return super().optimizer_ranks(size) if self.server_rule == "optimizer" else ()

        def narrow(self, contract: Contract, size: int) -> Contract:
            contract = replace(super().narrow(contract, size), parameters="kept" if size == 1 else "replaced")
            return contract if self.server_rule == "optimizer" else replace(contract, consensus="elsewhere")

    worker_type, server_type = _Worker, _Server
    steps_on_workers = True  # with Adagrad on the servers
    config: Config
