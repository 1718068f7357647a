"""Distributed L-BFGS: vectors are sharded over ranks, and batches are computed in portions by workers: Sandblaster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.config.settings import Field, joint_rule
from hpcdist.errors import ConfigError
from hpcdist.model.flat import FlatModel
from hpcdist.records import StepRecord
from hpcdist.strategies.base import Contract, Outcome, Strategy, Update
from hpcdist.strategies.common.replicas import with_buffers
from hpcdist.strategies.common.state import Flats, first
from hpcdist.strategies.lbfgs.algorithm import Lbfgs, LbfgsConfig
from hpcdist.strategies.lbfgs.coordinator import COORDINATOR, Coordinator, PortionWorker, assign_lbfgs
from hpcdist.strategies.lbfgs.portions import JointBatch
from hpcdist.strategies.lbfgs.vectors import FIELDS, MAX_OPERATIONS, RETURNING, HistoryShard, RemoteVectors, SharedPoint
from hpcdist.strategies.server.channel import CHECK_S, GRADIENT, PAUSE, Reply, RequestChannel, ServerRequest
from hpcdist.strategies.server.placement import Roles, Shard, broadcast_shards

OPERATIONS, ASK = 6, 7  # kinds of requests, beside those of servers: to a shard, and to the coordinator
NUMBERS = 8  # in a worker's request to the coordinator
_log = logging.getLogger("hpcdist")


@final
class Sandblaster(Strategy):
    """Take a step of L-BFGS on the joint batch of all workers, with a strong Wolfe line search.

    Rank 0 coordinates: it sends operations (dot, axpy, scale, copy) to the shards, and has no vectors. Ranks 1 to
    `servers` are the shards: each has one range of the parameters, the gradient and the history. The other ranks are
    workers. With two ranks the first is coordinator and shard; a single rank does everything.

    A step's batch has `batch_size` samples per worker, and is split into `portions` portions per worker. An idle worker
    gets the next portion: it fetches the parameters from the shards, and pushes the gradient to them. A slow worker
    gets none of the last portions, and none at all if the others will finish before it could finish one; after ten
    times its time per portion it is tried again. If a slow worker is still computing a portion, or a portion takes
    longer than 80 % of all portions, an idle worker computes it too, and the first result counts. So a slow worker
    does not delay the others, and a worker that becomes slow delays a step by at most one portion; only at an epoch's
    end all wait for portions in flight. Portions of a failed worker are given to others. Each shard adds gradients in
    the order of the portions, so that the sum is bitwise the same, whichever workers computed them.

    Every step starts with the gradient of the new batch at the current point (already known if the batch is the whole
    data set). The line search evaluates the loss a few times on the same batch. It tries steps longer than L-BFGS's
    only if the batch is the whole data set, because a longer step that helps one batch harms the next. The pair (s, y)
    of the history is computed on this batch at both ends of the step; with `overlap` on the samples that this batch
    shares with the next batch, as in multi-batch L-BFGS. Batches must be large: thousands of samples rather than tens.

    The loop passes each step a closure that computes a portion: `optimizer.step(closure)`, see `hpcdist.shard`. The
    job's optimiser does not run: its learning rate, momentum and weight decay, and schedules, have no effect, because
    the line search finds the length of each step. Add weight decay to the loss. `clip_norm` is the length of the first
    step, without history; default: 1.

    Messages per step: with m pairs of the history and e evaluations, 2m + 2e + 6 messages of a few numbers from the
    coordinator to each shard, and as many replies. Bytes per worker: n of parameters for each evaluation, and n of
    gradients for each portion. Memory of a shard: 2m + 6 times its range, plus once for each worker.

    Example on 3 ranks:
        >>> lbfgs = hd.DistributedOptimizer(sgd, model, "sandblaster")

    Reference: Jeffrey Dean et al., "Large scale distributed deep networks", 2012, section 4.2; Dong Liu, Jorge Nocedal,
    "On the limited memory BFGS method for large scale optimization", 1989; for `overlap`, Albert Berahas, Jorge
    Nocedal, Martin Takáč, "A multi-batch L-BFGS method for machine learning", 2016.
    """

    class Config(LbfgsConfig):
        servers: int = Field(1, "ranks that hold shards of the vectors, besides the coordinator", ge=1)
        portions: int = Field(4, "portions of a batch for each worker", ge=1)
        overlap: float = Field(
            0.0,
            "part of a batch that the next batch repeats, to compute y; 0: compute y on the whole batch",
            ge=0,
            le=0.5,
        )
        seed: int = Field(0, "seed of dropout and other random layers, the same in all evaluations of a step", ge=0)

        @joint_rule
        def _searches(self) -> None:
            if not self.c1 < self.c2:
                raise ValueError(f"strategy.c1 must be less than strategy.c2; got {self.c1} and {self.c2}.")
            if self.on_nonfinite == "ignore":
                raise ValueError(
                    "strategy.on_nonfinite must be stop or skip with sandblaster, whose line search needs finite "
                    "losses; got ignore. Use skip."
                )

        def workers(self, size: int) -> tuple[int, ...]:
            return assign_lbfgs(size, self.servers).workers

        def needed(self, size: int) -> tuple[int, ...]:
            return tuple(sorted({COORDINATOR, *assign_lbfgs(size, self.servers).shards}))

        def narrow(self, contract: Contract, size: int) -> Contract:
            return replace(contract, ranks="all work") if len(self.workers(size)) == size else contract

    contract = Contract(
        averages="gradients", synchronizes="never", updates="on servers", batch="portions", ranks="some serve",
        consensus="elsewhere", deaths="others continue",
    )  # fmt: skip

    config: Config
    coordinator: Coordinator  # on rank 0
    shard: HistoryShard  # on ranks that have a range of the vectors
    worker: PortionWorker  # on workers
    sums: RequestChannel  # to the shards, where there is more than one rank
    work: RequestChannel  # to the coordinator

    def __init__(self, config: Config, comm: Communicator, model: FlatModel, **kwargs: Any):
        self.roles = roles = assign_lbfgs(comm.size, config.servers)
        super().__init__(config, comm, model, **kwargs)
        self._check_optimizer()
        self.coordinates, self.has_shard = comm.rank == COORDINATOR, comm.rank in roles.shards
        self.joint: JointBatch | None = None  # the batch of the next step, set by the loop
        self.point = self.opened(SharedPoint(comm, roles.shards, model.params))
        if comm.size > 1:
            self.sums, self.work = self._open_channels()
        self._asked: dict[int, ServerRequest] = {}  # requests to the coordinator without a reply, by worker
        self._dead: set[int] = set()
        portions = config.portions * len(roles.workers)
        self._event: str | None = None  # event of a step on a single rank
        self.state.parameters = lambda: None
        if self.has_shard:
            shard, state, overlaps = self.point.shards[comm.rank], self.state, config.overlap > 0
            self.shard = HistoryShard(self.point, shard, model, state, config.history, overlaps)
            state.parameters = lambda: Flats(shard.of(model.params), shard.ranges)
        if self.coordinates:
            vectors = RemoteVectors(self._operate)
            precision = max((torch.finfo(flat.dtype).eps for flat in model.params), default=0.0)
            lbfgs = Lbfgs(config, vectors, self.gradients.clip_norm or 1.0, resolution=4 * precision)
            coordinator = Coordinator(lbfgs, vectors, portions, self._report)
            self.state.custom("lbfgs", coordinator.state_dict, coordinator.load_state_dict, lambda: None, reshard=first)
            self.coordinator = coordinator
        if self.is_worker:
            self.worker = PortionWorker(comm, model, self.point, portions, config.seed, self._push, self._ask)
        clock_owner: Any = self.worker if self.is_worker else self.coordinator if self.coordinates else self
        clock_owner.clock = self.state.value("clock", 0, clock_owner, reshard="max")

    def _open_channels(self) -> tuple[RequestChannel, RequestChannel]:
        """Collective. Open the channels to the shards and to the coordinator.

        There is a single channel if rank 0 is both, since a rank can wait for only one channel.
        """
        roles, needed = self.roles, self.config.needed(self.comm.size)
        results = [torch.zeros(MAX_OPERATIONS, dtype=torch.float64)]
        one_rank_serves = COORDINATOR in roles.shards
        pushing = roles.workers if one_rank_serves else (COORDINATOR, *roles.workers)
        sums = RequestChannel(
            self.comm, Roles(needed, (), pushing, dict.fromkeys(pushing, roles.shards)), self.point.shards,
            self.model.params, names=0, clocks=2, values=MAX_OPERATIONS * FIELDS, replies=results,
            without_tensors={COORDINATOR},
        )  # fmt: skip
        self.opened(sums)
        if one_rank_serves:
            return sums, sums
        asking = Roles(needed, (), roles.workers, dict.fromkeys(roles.workers, (COORDINATOR,)))
        work = RequestChannel(
            self.comm, asking, {COORDINATOR: Shard(())}, [], names=0, clocks=0, values=NUMBERS, replies=results
        )
        return sums, self.opened(work)

    def _check_optimizer(self) -> None:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        if any(group.get("maximize") for group in groups):
            raise ConfigError("maximize of the optimiser must be False with sandblaster; got True. Negate the loss.")
        decays = max((group.get("weight_decay") or 0.0 for group in groups), default=0.0)
        if decays and self.comm.rank == COORDINATOR:
            _log.warning(
                "sandblaster does not run %s, and does not apply its weight_decay, %g. Add it to the loss.",
                type(self.optimizer).__name__, decays,
            )  # fmt: skip

    # --- workers --------------------------------------------------------------------------------------------------
    def advance(self, update: Update) -> Outcome:
        raise ConfigError(
            "closure must be given to each step with sandblaster, which evaluates the loss of a portion of the batch "
            "several times; got none. Call optimizer.step(closure); closure(portion) runs the backward pass of the "
            "samples in that slice, and returns their mean loss."
        )

    def minimise(self, solve: Callable[..., Any], closure: Callable[[slice], Any]) -> tuple[StepRecord, Tensor]:
        """Take one step on the joint batch; this worker computes the portions that the coordinator assigns.

        Args:
            solve: the local optimiser's step; not called.
            closure: runs the backward pass of a slice of the joint batch, without gradients before; returns its loss.

        Returns:
            The step's record, and the loss of the batch at the start of the step, a float64 scalar, shape ().
        """
        if self.joint is None:
            raise ConfigError(
                "a step with sandblaster must be of a batch that is known to all ranks; got one outside of a loop over "
                "hpcdist.shard(loader). Iterate over that."
            )
        self.model.refresh()
        if self.coordinates:  # a single rank, without periods of service
            self.coordinator.start()
        with self.comm.trace.span(type(self).__name__, "strategy"):
            loss = self.worker.step(closure, self.joint)
        if self.coordinates:
            self.coordinator.finish()
        staleness = (0,) if self.joint.share else ()
        event, self._event = self._event, None
        counted = 0 if self.coordinates else 1  # `_report` has counted it there
        record = self.finish_step(Outcome(self.worker.clock, staleness, event), counted)
        return record, torch.tensor(loss, dtype=torch.float64)

    def _ask(self, message: Sequence[float]) -> list[float]:
        """Send a worker's message to the coordinator; return the numbers of its reply, see `Coordinator`."""
        if self.coordinates:
            self.coordinator.receive(self.comm.now(), self.comm.rank, *message)
            ((_, reply),) = self.coordinator.take_replies(self.comm.now())
            return reply
        self.work.client.push(ASK, values=message)
        self.work.client.wait()
        return _reply_values(self.work, COORDINATOR, 3)

    def _push(self, evaluation: int, portion: int, weight: float) -> None:
        """Push the gradients in the model to all shards, and wait until they are counted."""
        if self.has_shard:
            self.shard.push(evaluation, portion, weight, self.model.grads)
            return
        clocks = [[evaluation, portion]] * len(self.roles.shards)
        self.sums.client.push(GRADIENT, clocks, self.model.grads, weight=weight)
        self.sums.client.wait()

    def pause(self) -> None:
        if not self.coordinates:
            self.work.client.push(PAUSE)
            (self.worker.clock,) = self.work.client.wait().clocks
        self.worker.fetch(0)

    # --- coordinator and shards -----------------------------------------------------------------------------------
    def serve(self, update: Update) -> None:
        self.model.refresh()
        if self.coordinates:
            self._coordinate()
        else:
            self._serve_shard()

    def _coordinate(self) -> None:
        """Assign portions until every worker has paused or failed."""
        coordinator, paused = self.coordinator, dict[int, ServerRequest]()
        coordinator.start()
        while not paused.keys() | self._dead >= set(self.roles.workers):
            request = self._next_request(self.work, coordinator.patience_s(self.comm.now()))
            if request is not None and request.kind == GRADIENT:
                self._count(request)
            elif request is not None and request.kind == PAUSE:
                paused[request.source] = request
            elif request is not None:
                self._asked[request.source] = request
                coordinator.receive(self.comm.now(), request.source, *request.values[:NUMBERS].tolist())
            self._forget_dead()
            replies = coordinator.take_replies(self.comm.now())
            self.work.inbox.reply(*(_reply(self._asked.pop(worker), numbers) for worker, numbers in replies))
        coordinator.finish()
        self.work.inbox.reply(
            *(Reply(paused[rank], coordinator.clock) for rank in sorted(paused) if rank not in self._dead)
        )

    def _next_request(self, channel: RequestChannel, patience_s: float | None = None) -> ServerRequest | None:
        """Block until there is a request; return None after `patience_s`, or CHECK_S where ranks may fail."""
        if self.comm.failures.tolerant:
            patience_s = CHECK_S if patience_s is None else min(patience_s, CHECK_S)
        request = channel.inbox.next(patience_s)
        if request is None:
            channel.require_alive()
        return request

    def _forget_dead(self) -> None:
        """Remove workers that have failed."""
        new = set(self.comm.failures.failed()) - self._dead
        self._dead |= new
        for rank in sorted(new):
            self._report(0, f"goes on without rank {rank}: it has died")
            self._asked.pop(rank, None)
        self.coordinator.forget(new)

    def _serve_shard(self) -> None:
        """Count gradients, and run the coordinator's operations, until it ends the period."""
        self.shard.has_finished = False
        while not self.shard.has_finished:
            request = self._next_request(self.sums)
            if request is not None and request.source == COORDINATOR:
                (count,) = request.clocks
                self.sums.inbox.reply(_reply(request, self.shard.run(request.values[:count].tolist())))
            elif request is not None:
                self._count(request)
        self._report(0, None)

    def _count(self, request: ServerRequest) -> None:
        """Add a worker's gradient to the shard, and reply."""
        evaluation, portion = request.clocks
        self.shard.push(evaluation, portion, request.weight, list(request.tensors))
        self.sums.inbox.reply(Reply(request, 0))

    def _operate(self, operations: Sequence[float]) -> list[float]:
        """Run operations on all shards; return the sums of their results."""
        if self.has_shard:
            return self.shard.run(operations)
        shards, count = self.roles.shards, sum(code in RETURNING for code in operations[::FIELDS])
        self.sums.client.push(OPERATIONS, [[len(operations)]] * len(shards), values=operations)
        self.sums.client.wait()
        results = [_reply_values(self.sums, rank, count) for rank in shards]
        return [sum(column) for column in zip(*results, strict=True)]

    def _report(self, steps: int, event: str | None) -> None:
        """Write a record of a coordinator or shard, after `steps` more steps."""
        self.steps += steps
        if self.is_worker:
            self._event = event
        else:
            self.records.report(self.steps, Outcome(self.coordinator.clock if self.coordinates else 0, event=event))

    def consensus(self) -> tuple[list[Tensor], list[Tensor]]:
        """Collective. Return the shards' parameters, and the buffers averaged over the workers."""
        params = [flat.clone() for flat in self.model.params]
        broadcast_shards(self.comm, self.point.shards.items(), params)
        return with_buffers(self, params)


def _reply(request: ServerRequest, numbers: Sequence[float]) -> Reply:
    return Reply(request, 0, [torch.tensor(numbers, dtype=torch.float64)])


def _reply_values(channel: RequestChannel, parent: int, count: int) -> list[float]:
    """Return the first `count` numbers of the last reply of rank `parent`."""
    (numbers,) = channel.down.read(parent, ())
    return numbers[:count].tolist()
