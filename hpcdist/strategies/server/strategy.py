"""Train with parameter servers: a worker's loop, a server's loop, and a channel of requests between them."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from pydantic import Field, model_validator
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.compress import CompressionConfig, spans
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Outcome, Strategy, Update, name_of
from hpcdist.strategies.common.contract import Contract
from hpcdist.strategies.common.replicas import with_buffers
from hpcdist.strategies.common.state import Flats, copy_all
from hpcdist.strategies.server.channel import PAUSE, RequestChannel
from hpcdist.strategies.server.codec import Codec, CodedSlots, Content
from hpcdist.strategies.server.placement import Placement, Roles, Servers, Shard, assign, broadcast_shards
from hpcdist.strategies.server.server import Replica, Server
from hpcdist.strategies.server.slots import OpenSlots, TensorSlots


class ServerStrategy(Strategy):
    """Let workers push requests to servers, which deal with them in order of arrival and reply with parameters.

    Each server holds one shard, and treats its part of every request as if there were no other server; they are not
    synchronised with each other. Shards are of whole parameters, the largest as small as that allows, so that any
    optimiser does on them what it does on the whole; a server for which there is none left counts and replies all the
    same. With `split_parameters` they have equal bytes instead. A server that is a worker too (`servers = "colocated"`)
    serves while it is inside a step: there the shard's parameters are those that lie in its model, which nobody
    computes with meanwhile.

    With `compression` workers send what the compressor makes of their gradients and of what they have not sent before,
    and servers, unless `compress_replies` is off, what it makes of all that a worker's parameters differ by from their
    own. So workers compute with parameters that are somewhat older here and there; records don't count that as
    staleness. Any compressor will do for replies whose error is smaller than what it codes; `threshold` needs a
    density, or a `tau` that suits updates as well as gradients. Memory: two parameter vectors more per worker, and on
    each server its shard once per worker. An aggregator codes its sums as a worker its gradients.

    A period of service (an epoch, or the steps until a checkpoint) ends when every worker has paused. A request of a
    worker that has begun its next period already waits until this rank begins it too.

    A subclass calls `compose` at the end of its `__init__`.

    Attributes:
        place: what this rank serves, and for which ranks.
        replica: this rank's parameters, and their clocks.
        worker: takes steps, on a worker that has servers.
        server: serves, on a server or aggregator.
        synchronous: every update is of all workers' gradients.
        sends_hyperparameters: servers run the job's optimiser, with the numbers of the workers' param_groups.
        update_norm: to which servers clip the gradient of an update, which is of all workers; None: they clip none.
        servers: the ranks that do so together, where several have a shard.
    """

    class Config(Strategy.Config):
        """Options that all strategies with servers have."""

        _former: ClassVar = {"compress_answers": "compress_replies"}
        servers: Servers = Field(
            1, description="ranks that only serve, each a part of the parameters; colocated: all workers also serve"
        )
        learner_deadline_s: float | None = Field(
            None, gt=0, description="seconds after which servers go on without a silent worker; none: they wait for it"
        )
        compression: CompressionConfig = Field(CompressionConfig(), description="how messages to servers are coded")
        compress_replies: bool = Field(True, description="also compress what servers send")
        split_parameters: bool = Field(
            False, description="equal parts for all servers; needs an optimiser that treats elements one by one"
        )

        @model_validator(mode="after")
        def _shards_wait_for_their_owners(self):
            if self.servers == "colocated" and self.learner_deadline_s is not None:
                raise ValueError(
                    "strategy.learner_deadline_s must be none where strategy.servers is 'colocated', where all wait "
                    f"for every rank's shard; got {self.learner_deadline_s}. Give ranks of their own to the servers."
                )
            return self

        def roles(self, size: int) -> Roles:
            """Return the roles of `size` ranks."""
            return assign(size, self.servers, getattr(self, "fan_in", None))

        def workers(self, size: int) -> tuple[int, ...]:
            return self.roles(size).workers

        def needed(self, size: int) -> tuple[int, ...]:
            return self.roles(size).needed

        def optimizer_ranks(self, size: int) -> tuple[int, ...]:
            return self.roles(size).servers

        def averages(self, workers: int) -> bool:
            """Tell whether an update is the mean of several gradients, where a strategy averages gradients."""
            return workers > 1

        def narrow(self, contract: Contract, size: int) -> Contract:
            if contract.averages == "gradients" and not self.averages(len(self.workers(size))):
                contract = replace(contract, averages="nothing")
            if len(self.workers(size)) == size:  # each rank has its own shard's newest values
                contract = replace(contract, parameters="kept", ranks="all work")
            return contract

    contract = Contract(
        averages="nothing", synchronizes="never", updates="on servers", parameters="replaced", ranks="some serve",
        deaths="others continue",
    )  # fmt: skip
    up: Content = "gradients"  # what requests carry, see `Codec`
    down: Content = "values"  # and replies
    steps_on_workers = False  # workers run their local optimiser

    config: Config
    worker: Worker
    server: Server

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any):
        self.roles = roles = config.roles(comm.size)
        super().__init__(config, comm, model, **kwargs)
        self.synchronous = self.contract.synchronous
        self.sends_hyperparameters = self.contract.updates == "on servers"
        clips = self.synchronous and self.contract.averages == "gradients"
        self.update_norm = self.gradients.clip_norm if clips else None
        if self.stages is not None and self.stages.comm.size > 1:
            self._check_stages()
        self.place = place = Placement(comm.rank, roles, model, split_parameters=config.split_parameters)
        self.replica = Replica(place, model, self.state)
        self.servers: Communicator | None = None
        if place.alone:
            model.keep_gradients(None)
            return
        clocks = max(1, len(roles.workers)) if roles.aggregators else 1
        values = len(self.hyperparameters) * self.sends_hyperparameters + self.synchronous
        self.replica.channel = RequestChannel(
            comm, roles, place.shards, model.params, len(model.slots), clocks, *self._slots(), values=values
        )
        serves, own = comm.rank in roles.servers, self.hyperparameters.counters
        if self.update_norm is not None and len(roles.servers) > 1:
            self.servers = comm.split(0 if serves else 1)
        self.state.parameters = lambda: Flats(self.server.master(), place.shard.ranges) if serves else None
        self.state.before_load(self._forget_moments_of_others)

        def load(pairs: Iterable[Sequence[Any]]) -> None:
            own.clear()
            own.update((number, key) for number, key in pairs)

        self.state.custom(
            "own_numbers", lambda: list(map(list, sorted(own))), load, own.clear,
            reshard=lambda saved: [pair for of_rank in saved for pair in of_rank], optional=True,
        )  # fmt: skip

    def compose(self, worker: Callable[[], Worker], server: Callable[[], Server]) -> None:
        """Make the parts of this rank. On one rank alone the local optimiser steps, and there are none.

        Args:
            worker: makes the part that takes a worker's steps.
            server: makes the part that deals with a server's requests.
        """
        if self.is_worker and not self.place.alone:
            self.worker = worker()
        if self.place.children:
            self.server = server()
        if self.place.colocated:
            self.replica.channel.client.meanwhile = self.server.serve_waiting

    def _check_stages(self) -> None:
        """Raise ConfigError where an option does not suit servers that have one stage of the model each."""
        if self.update_norm is not None:
            raise ConfigError(
                f"clip_norm must be None with {name_of(self)} and several stages, whose servers see one stage's "
                f"gradient; got {self.update_norm}. Use allreduce, which clips by the norm of all stages."
            )
        if self.config.servers == "colocated" and not self.synchronous and self.comm.size > 1:
            raise ConfigError(
                f"strategy.servers must be a number of ranks of their own with {name_of(self)} and several stages, for "
                "a rank that waits for another stage can't serve; got colocated. Use servers = 1."
            )

    def _slots(self) -> tuple[OpenSlots, OpenSlots]:
        """Return what opens the slots of requests, and of replies."""
        config = self.config.compression
        if config.warmup_ranks is not None and self.steps_on_workers:
            raise ConfigError(
                f"strategy.compression.warmup_ranks must be none with {name_of(self)}, whose workers take steps of "
                f"their own; got {config.warmup_ranks}. Leave it out: what is sent first is uncompressed then."
            )
        if not config:
            return TensorSlots, TensorSlots
        places = spans(self.model)
        up = partial(CodedSlots, Codec(config, "requests", self.up, places, self.state))
        if not self.config.compress_replies:
            return up, TensorSlots
        return up, partial(CodedSlots, Codec(config, "replies", self.down, places, self.state))

    # --- workers and servers --------------------------------------------------------------------------------------
    def advance(self, update: Update) -> Outcome:
        if self.place.alone:
            outcome = self.gradients.step_alone(update)
            self.replica.clock += outcome.event is None
            return replace(outcome, clock=self.replica.clock)
        if not self.place.colocated:
            return self.worker.step(update)
        self.server.update = update
        outcome = self.worker.step(update)
        applied, self.server.applied = self.server.applied, []
        return replace(outcome, staleness=(*outcome.staleness, *applied))

    def pause(self) -> None:
        if not self.place.alone:
            self.worker.pause()
        if self.place.colocated:
            self.server.serve_between_steps()

    def drain(self) -> None:
        if self.place.colocated:  # a rank in another call serves nobody
            self.pause()

    def serve(self, update: Update) -> None:
        if self.place.children:
            self.server.serve(update)

    # --- common ---------------------------------------------------------------------------------------------------
    def consensus(self) -> tuple[list[Tensor], list[Tensor]]:
        """Collective. Take the servers' parameters; average buffers, which only workers compute, over the workers."""
        params = [flat.clone() for flat in self.model.params]
        if self.comm.rank in self.roles.servers:
            copy_all(self.place.shard.of(params), self.server.master())
        broadcast_shards(self.comm, self._shards_of_servers(), params)
        return with_buffers(self, params)

    def reset_from_model(self) -> None:
        super().reset_from_model()
        if self.sends_hyperparameters:
            broadcast_shards(self.comm, self._shards_of_servers(), self.model.params)
            clocks = self.comm.failures.retry_on_failure(partial(self.comm.gather, self.replica.clock))
            servers = self.roles.servers  # aggregators have one above them
            self.replica.follow([clocks[p if p in servers else servers[0]] for p in self.place.parents])

    def _shards_of_servers(self) -> list[tuple[int, Shard]]:
        return [(server, self.place.shards[server]) for server in self.roles.servers]

    def close(self) -> None:
        if self.servers is not None:
            self.servers.close()
        if not self.place.alone:
            self.replica.channel.close()

    def _forget_moments_of_others(self) -> None:
        """Drop the optimiser's state of parameters that other ranks' optimisers step, which would only grow old."""
        serves = self.comm.rank in self.config.optimizer_ranks(self.comm.size)
        if self.optimizer is None or (self.steps_on_workers and self.is_worker):
            return
        for slot in self.model.slots:
            if not (serves and self.place.shard.overlaps(slot.group, slot.start, slot.stop)):
                self.optimizer.state.pop(slot.tensor, None)


class Worker(abc.ABC):
    """Take the steps of a worker that has servers.

    Args:
        strategy: whose worker this is.
    """

    def __init__(self, strategy: ServerStrategy):
        self.strategy, self.model, self.place = strategy, strategy.model, strategy.place
        self.replica, self.channel = strategy.replica, strategy.replica.channel
        self.client = self.channel.client

    @abc.abstractmethod
    def step(self, update: Update) -> Outcome:
        """Take one step on the gradients in `model.grads`; decide when `update` runs."""

    def finish(self) -> None:
        """Complete what is under way, before a pause."""

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
        strategy, rank = self.strategy, self.place.rank
        values = strategy.hyperparameters.values() if strategy.sends_hyperparameters else []
        if strategy.synchronous:
            values.append(float(self.model.gradients.skipped))
        clocks = zip(self.place.parents, self.replica.clocks, strict=True)
        # This rank's own shard in the model is the newest.
        return {"clocks": [[self.replica.clock if p == rank else clock] for p, clock in clocks], "values": values}


TURN_S = 0.001  # how long a rank that serves several strategies waits for requests of one


def serve_jointly(served: Sequence[tuple[ServerStrategy, Update]]) -> None:
    """Serve the workers of several strategies until all of them have paused: by turns, where there are several."""
    if len(served) == 1:
        strategy, update = served[0]
        strategy.serve(update)
        return
    for strategy, update in served:
        strategy.server.start(update)
    servers = [strategy.server for strategy, _ in served]
    waiting = servers
    while waiting:
        waiting = [server for server in waiting if server.serve_next(TURN_S)]
    for server in servers:
        server.end()
