"""Train with parameter servers: a worker's loop, a server's loop, and a channel of requests between them."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.compress import CompressionConfig, spans
from hpcdist.config.settings import Field, joint_rule
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Contract, Outcome, Strategy, Update, name_of
from hpcdist.strategies.common.replicas import with_buffers
from hpcdist.strategies.common.state import Flats, copy_all
from hpcdist.strategies.server.channel import PAUSE, Replies, RequestChannel
from hpcdist.strategies.server.codec import Codec, CodedSlots, Content, OpenSlots, TensorSlots
from hpcdist.strategies.server.placement import Roles, Servers, Shard, assign, broadcast_shards
from hpcdist.strategies.server.server import Replica, Server


class ServerStrategy(Strategy):
    """Base of strategies with servers: workers push requests; servers handle them in order and reply with parameters.

    Each server holds one shard, and handles its part of every request independently of other servers. Shards contain
    whole parameters, with the largest shard as small as possible, so that any optimiser gives the same result as on the
    whole model; with fewer parameters than servers some shards are empty. With `split_parameters` shards have equal
    bytes instead. A server that is a worker too (`servers = "colocated"`) serves during its steps; its shard is a part
    of its model, which no backward pass uses then.

    With `compression` workers send compressed gradients with error feedback; servers, unless `compress_replies` is off,
    send compressed differences to the worker's parameters. So workers compute with slightly older parameters, which
    records don't count as staleness. For replies any compressor works whose error is smaller than its input;
    `threshold` needs a density, or a `tau` that suits updates as well as gradients. Memory: two more parameter vectors
    per worker, and on each server its shard once per worker. An aggregator compresses its sums like gradients.

    A subclass names the types of its workers and servers. Periods of service, pauses: see `Server`.

    Attributes:
        replica: this rank's shard, parents and children, and its parameters with their clocks.
        worker: takes the steps of a worker, where there are servers.
        server: handles requests, on a server or aggregator.
        synchronous: every update uses the gradients of all workers.
        sends_hyperparameters: servers run the job's optimiser, with the hyper-parameters of the workers' param_groups.
        update_norm: norm to which servers clip the gradient of an update of all workers; None: no clipping.
        servers: communicator of the servers, to clip by the norm over several shards.
    """

    class Config(Strategy.Config):
        servers: Servers = Field(
            1, "number of server ranks, each with a shard; colocated: all ranks are workers and servers"
        )
        learner_deadline_s: float | None = Field(
            None, "seconds after which servers evict a silent worker; none: they wait for it", gt=0
        )
        compression: CompressionConfig = Field(CompressionConfig(), "how messages to servers are compressed")
        compress_replies: bool = Field(True, "also compress what servers send")
        split_parameters: bool = Field(False, "equal bytes for all servers; needs an elementwise optimiser")

        @joint_rule
        def _shards_wait_for_their_owners(self) -> None:
            if self.servers == "colocated" and self.learner_deadline_s is not None:
                raise ValueError(
                    "strategy.learner_deadline_s must be none where strategy.servers is 'colocated', where all wait "
                    f"for every rank's shard; got {self.learner_deadline_s}. Give ranks of their own to the servers."
                )

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
            """Return whether an update is the mean of several gradients, where a strategy averages gradients."""
            return workers > 1

        def narrow(self, contract: Contract, size: int) -> Contract:
            if contract.averages == "gradients" and not self.averages(len(self.workers(size))):
                contract = replace(contract, averages="nothing")
            if len(self.workers(size)) == size:  # each rank has its shard's newest values
                contract = replace(contract, parameters="kept", ranks="all work")
            return contract

    contract = Contract(
        averages="nothing", synchronizes="never", updates="on servers", parameters="replaced", ranks="some serve",
        deaths="others continue",
    )  # fmt: skip
    up: Content = "gradients"  # content of requests, see `Codec`
    down: Content = "values"  # content of replies
    steps_on_workers = False  # workers run their local optimiser

    worker_type: ClassVar[type[Worker]]  # its objects take a worker's steps, where there are servers
    server_type: ClassVar[type[Server]]  # its objects handle the requests, on a server or aggregator

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
        split = config.split_parameters
        self.replica = replica = Replica(comm.rank, roles, model, self.state, split_parameters=split)
        self.saved_role = list(replica.parents)
        self.servers: Communicator | None = None
        if replica.alone:
            model.keep_gradients(None)
            return
        clocks = max(1, len(roles.workers)) if roles.aggregators else 1  # largest number of gradients in a request
        values = len(self.hyperparameters) * self.sends_hyperparameters + self.synchronous  # see `Worker.stamps`
        channel = RequestChannel(
            comm, roles, replica.shards, model.params, len(model.slots), clocks, *self._slots(), values=values
        )
        replica.channel = self.opened(channel)
        serves, counters = comm.rank in roles.servers, self.hyperparameters.counters
        if self.update_norm is not None and len(roles.servers) > 1:
            self.servers = self.opened(comm.split(0 if serves else 1))
        self.state.parameters = lambda: Flats(self.server.master(), replica.shard.ranges) if serves else None
        self.state.before_load(self._forget_moments_of_others)

        def load(pairs: Iterable[Sequence[Any]]) -> None:
            counters.clear()
            counters.update((number, key) for number, key in pairs)

        self.state.custom(
            "own_numbers", lambda: list(map(list, sorted(counters))), load, counters.clear,
            reshard=lambda saved: [pair for of_rank in saved for pair in of_rank], optional=True,
        )  # fmt: skip

        if self.is_worker:
            self.worker = self.worker_type(self)
        if replica.children:
            self.server = self.server_type(self)
        if replica.colocated:
            channel.client.on_wait = self.server.serve_waiting

    def _check_stages(self) -> None:
        """Raise ConfigError where an option does not work with a model in pipeline stages."""
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
        """Return the functions that allocate the slots of requests and of replies."""
        config = self.config.compression
        if config.warmup_ranks is not None and self.steps_on_workers:
            raise ConfigError(
                f"strategy.compression.warmup_ranks must be none with {name_of(self)}, whose workers take steps of "
                f"their own; got {config.warmup_ranks}. Leave it out: what is sent first is uncompressed then."
            )
        if not config:
            return TensorSlots, TensorSlots
        parameter_spans = spans(self.model)
        up = partial(CodedSlots, Codec(config, "requests", self.up, parameter_spans, self.state))
        if not self.config.compress_replies:
            return up, TensorSlots
        return up, partial(CodedSlots, Codec(config, "replies", self.down, parameter_spans, self.state))

    # --- workers and servers --------------------------------------------------------------------------------------
    def advance(self, update: Update) -> Outcome:
        if self.replica.alone:
            outcome = self.gradients.step_alone(update)
            self.replica.clock += outcome.event is None
            return replace(outcome, clock=self.replica.clock)
        if not self.replica.colocated:
            return self.worker.step(update)
        self.server.update = update
        outcome = self.worker.step(update)
        applied, self.server.applied = self.server.applied, []
        return replace(outcome, staleness=(*outcome.staleness, *applied))

    def pause(self) -> None:
        if not self.replica.alone:
            self.worker.pause()
        if self.replica.colocated:
            self.server.serve_between_steps()

    def drain(self) -> None:
        if self.replica.colocated:  # a rank in another call can't serve
            self.pause()

    def serve(self, update: Update) -> None:
        if self.replica.children:
            self.server.serve(update)

    def consensus(self) -> tuple[list[Tensor], list[Tensor]]:
        """Collective. Return the servers' parameters, and the buffers averaged over the workers."""
        params = [flat.clone() for flat in self.model.params]
        if self.comm.rank in self.roles.servers:
            copy_all(self.replica.shard.of(params), self.server.master())
        broadcast_shards(self.comm, self._shards_of_servers(), params)
        return with_buffers(self, params)

    def reset_from_model(self) -> None:
        super().reset_from_model()
        if self.sends_hyperparameters:
            broadcast_shards(self.comm, self._shards_of_servers(), self.model.params)
            clocks = self.comm.failures.retry_on_failure(partial(self.comm.gather, self.replica.clock))
            servers = self.roles.servers  # an aggregator's parameters are those of the only server
            self.replica.follow([clocks[p if p in servers else servers[0]] for p in self.replica.parents])

    def _shards_of_servers(self) -> list[tuple[int, Shard]]:
        return [(server, self.replica.shards[server]) for server in self.roles.servers]

    def _forget_moments_of_others(self) -> None:
        """Drop the local optimiser's state of parameters that other ranks' optimisers update."""
        serves = self.comm.rank in self.config.optimizer_ranks(self.comm.size)
        if self.optimizer is None or (self.steps_on_workers and self.is_worker):
            return
        for slot in self.model.slots:
            if not (serves and self.replica.shard.overlaps(slot.group, slot.start, slot.stop)):
                self.optimizer.state.pop(slot.tensor, None)


class Worker(abc.ABC):
    """Take the steps of a strategy's worker, where there are servers."""

    def __init__(self, strategy: ServerStrategy):
        self.strategy, self.model = strategy, strategy.model
        self.replica, self.channel = strategy.replica, strategy.replica.channel
        self.client = self.channel.client

    @abc.abstractmethod
    def step(self, update: Update) -> Outcome:
        """Take one step on the gradients in `model.grads`; decide when `update` runs."""

    def pull(self) -> Replies:
        """Wait for the replies of all parents, and set the whole model to the servers' parameters."""
        replies = self.replica.pull()
        if self.replica.colocated:  # this server's parameters may be separate from its worker's model
            self.strategy.server.show()
        return replies

    def finish(self) -> None:
        """Complete requests in flight, before a pause."""

    def pause(self) -> None:
        """Announce the end of this period's requests, and wait for the reply."""
        self.finish()
        self.client.push(PAUSE)
        self.client.wait()

    def stamps(self) -> dict[str, Any]:
        """Return clocks and hyper-parameters to send with a request, as arguments of `Client.push`.

        In synchronous strategies the last value is the number of batches without a step, to compare.
        """
        strategy, rank = self.strategy, self.strategy.comm.rank
        values = strategy.hyperparameters.values() if strategy.sends_hyperparameters else []
        if strategy.synchronous:
            values.append(float(self.model.gradients.skipped))
        clocks = zip(self.replica.parents, self.replica.clocks, strict=True)
        # This rank's shard in its model is the newest.
        return {"clocks": [[self.replica.clock if p == rank else clock] for p, clock in clocks], "values": values}


TURN_S = 0.001  # seconds that a server of several strategies waits for requests of each in turn


def serve_jointly(served: Sequence[tuple[ServerStrategy, Update]]) -> None:
    """Serve the workers of several strategies in turn until all of them have paused."""
    if len(served) == 1:
        strategy, update = served[0]
        strategy.serve(update)
        return
    for strategy, update in served:
        strategy.server.start(update)
    servers = [strategy.server for strategy, _ in served]
    serving = servers
    while serving:
        serving = [server for server in serving if server.serve_next(TURN_S)]
    for server in servers:
        server.end()
