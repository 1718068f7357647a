"""Serve requests in order of arrival until every worker has paused, period after period."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hpcdist.compress import spans
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.common.state import State, copy_all
from hpcdist.strategies.server.channel import CHECK_S, PAUSE, Replies, Reply, RequestChannel, ServerRequest
from hpcdist.strategies.server.placement import Roles, Shard, create_shards


class Replica:
    """A rank's shard, parents and children, and its parameters with their clocks, replaced by replies shard by shard.

    On a rank that is worker and server, replies don't change its shard.

    Args:
        split_parameters: shards have equal bytes, and may start inside a parameter.

    Attributes:
        shards: the shard of each server; the whole model for aggregators.
        shard: the shard that this rank serves; empty on other ranks.
        parents: the ranks that this rank pushes requests to.
        children: the ranks that push requests to this rank.
        colocated: the rank is a worker, and serves during its steps.
        aggregates: the rank is an aggregator.
        alone: there is a single rank, and no server.
        channel: requests and replies, if there are several ranks.
        clock: number of updates of this rank's shard on a server; on a worker, of the first shard in the model.
        clocks: number of updates of the parameters from each parent.
    """

    channel: RequestChannel

    def __init__(self, rank: int, roles: Roles, model: FlatModel, state: State, *, split_parameters: bool):
        self._model = model
        everything = Shard(tuple((0, flat.numel()) for flat in model.params))
        shards = create_shards(model.params, max(1, len(roles.servers)), None if split_parameters else spans(model))
        self.shards = dict(zip(roles.servers, shards)) | dict.fromkeys(roles.aggregators, everything)
        self.shard = self.shards.get(rank, Shard(((0, 0),) * len(model.params)))
        self.parents, self.children = roles.parents.get(rank, ()), roles.children(rank)
        self.colocated = rank in roles.workers and bool(self.children)
        self.aggregates, self.alone = rank in roles.aggregators, not roles.servers
        others = [self.shards[parent] for parent in self.parents if parent != rank]
        self._replaced = others if self.colocated else [everything]  # by replies
        self.clock = state.value("clock", 0, self, reshard="max")
        # On another number of ranks all parents have the largest clock.
        self.clocks: list[int] = state.value("clocks", lambda: [self.clock] * len(self.parents), self)

    def pull(self) -> Replies:
        """Wait for the replies of all parents, and copy their parameters into the model."""
        replies = self.channel.client.wait()
        for shard in self._replaced:
            copy_all(shard.of(self._model.params), shard.of(self.channel.down.whole))
        self.follow(replies.clocks)
        return replies

    def follow(self, clocks: list[int]) -> None:
        """Set the clocks of the parents' parameters in the model."""
        self.clocks = clocks
        if clocks and not self.colocated:
            self.clock = clocks[0]


class Server(abc.ABC):
    """Serve the requests of this rank's children in order of arrival; a subclass decides what is due.

    Children are the ranks that push requests here: workers, or aggregators, which push for several workers. A period of
    service is an epoch, or the steps until a checkpoint. Each child's last request in it is PAUSE, and the period ends
    here once all have paused. A request of a child's next period waits until that starts here. A waiting request is due
    when the subclass can handle it, perhaps only once other children's requests have arrived.

    Attributes:
        waiting: requests without a reply, in order of arrival.
        due_s: time at which to call `apply_due` if no request arrives before; None: never.
        evicted: workers that have failed, or were silent for `learner_deadline_s`; the server does not wait for them.
        update: runs the local optimiser on the gradients in the model.
        applied: on a worker that is a server, the staleness of the gradients applied here since its last step.
    """

    def __init__(self, strategy: Any):  # a `ServerStrategy`, whose module imports this one
        self.strategy, self.comm, self.model = strategy, strategy.comm, strategy.model
        self.replica, self.channel = strategy.replica, strategy.replica.channel
        self.inbox, self._deadline_s = self.channel.inbox, strategy.config.learner_deadline_s
        self._watches = self.comm.failures.tolerant or self._deadline_s is not None
        self.waiting: list[ServerRequest] = []
        self.due_s: float | None = None
        self.evicted: set[int] = set()
        self.update: Update = lambda: None  # set by the first step
        self.applied: list[int] = []
        self._stepping = list(self.replica.children)  # children that have not paused in this period
        self._early: list[ServerRequest] = []  # requests of the next period
        self._unreported: Outcome | None = None  # the last one, until there is a record of it

    # --- methods that a subclass defines --------------------------------------------------------------------------
    @abc.abstractmethod
    def apply_due(self) -> None:
        """Handle the waiting requests that are due, and reply; called at each change, also of active workers."""

    def holds(self, request: ServerRequest) -> bool:
        """Return whether a request has to wait until it is due; False if it already has its reply."""
        return True

    def returned(self, child: int) -> None:
        """Record that an evicted worker has pushed again."""

    def master(self) -> Sequence[Tensor]:
        """Return the parameters of this server's shard, one flat tensor per group."""
        return self.replica.shard.of(self.model.params)

    # --- a period of service --------------------------------------------------------------------------------------
    def serve(self, update: Update) -> None:
        """Serve one period, on a rank that is only a server."""
        self.start(update)
        while self.serve_next():
            pass
        self.end()

    def serve_between_steps(self) -> None:
        """Serve the end of a period, on a rank that serves during its steps, and start the next period."""
        self.start(self.update)
        while self.serve_next():
            pass
        self._stepping = list(self.replica.children)
        self._handle_early()
        if self.applied:
            self.report(Outcome(self.replica.clock, staleness=tuple(self.applied)))
            self.applied = []

    def start(self, update: Update) -> None:
        """Start a period of service."""
        self.model.refresh()
        if not self.replica.colocated:  # the loop may have changed the parameters, by loading others for example
            copy_all(self.master(), self.replica.shard.of(self.model.params))
            self.strategy.steps = max(self.strategy.steps, self.replica.clock)  # loaded on other ranks: a worker's
        self.update = update
        self.inbox.since_s.update(dict.fromkeys(self.active(), self.comm.now()))
        self._handle_early()

    def serve_next(self, timeout_s: float | None = None) -> bool:
        """Handle the next request, if one arrives in time; return False once every worker has paused."""
        dead = self.comm.failures.failed()
        if all(child in dead for child in self._stepping):
            return False
        due_s = self.due_s
        limits = [] if due_s is None else [max(0.0, due_s - self.comm.now())]
        if self._watches:
            limits += self._patience_s()
        if timeout_s is not None:
            limits.append(timeout_s)
        request = self.inbox.next(min(limits, default=None))
        if request is not None:
            self._deal(request)
        elif due_s is not None:
            self.apply_due()
        if self._watches:
            self._evict()
        self.report()  # of an update, with the traffic of its replies
        return True

    def serve_waiting(self) -> None:
        """Block until there is a request or this rank's replies have arrived; handle all requests."""
        self.inbox.wait_event()
        while (request := self.inbox.poll()) is not None:
            self._deal(request)

    def end(self) -> None:
        """End a period of service, and copy the served parameters into the model, for the loop to evaluate or save."""
        self._stepping = list(self.replica.children)
        self.show()
        if self.replica.aggregates:
            self.channel.client.push(PAUSE)
            self.channel.client.wait()
        self.report()

    def show(self) -> None:
        """Copy the served parameters into the model."""
        copy_all(self.replica.shard.of(self.model.params), self.master())

    def _handle_early(self) -> None:
        """Handle requests of this period that arrived before its start here."""
        early, self._early = self._early, []
        for request in early:
            self._deal(request)

    def receive(self, request: ServerRequest) -> None:
        """Add a request to those waiting, unless it has its reply, and handle what is due."""
        if self.holds(request):
            self.waiting.append(request)
            self.apply_due()

    def _deal(self, request: ServerRequest) -> None:
        """Handle a new request of a child: reply to PAUSE, keep one of the next period for its start, receive others.

        An evicted child is readmitted first, because `apply_due` counts only active children. PAUSE makes the child
        inactive, so that requests of others may be due.
        """
        child = request.source
        if child in self.evicted:
            self.evicted.remove(child)
            self.report(Outcome(self.replica.clock, event=f"rank {child} is back"))
            self.returned(child)
        if child not in self._stepping:
            self._early.append(request)
        elif request.kind == PAUSE:
            self._stepping.remove(child)
            self.inbox.reply(Reply(request, self.replica.clock))
            self.apply_due()
        else:
            with self.comm.trace.span(f"request of rank {child}", "server", clock=self.replica.clock):
                request.since_s = self.comm.now()
                self.receive(request)

    def count_update(self, staleness: Sequence[int] = ()) -> None:
        """Count an update with gradients of these staleness values, for the next record."""
        self.replica.clock += 1
        if self.replica.colocated:
            self.applied += staleness
        else:
            self.report()
            self.strategy.steps += 1
            self._unreported = Outcome(self.replica.clock, staleness=tuple(staleness))

    def report(self, outcome: Outcome | None = None) -> None:
        """Write a record of the last update, unless that is done, and one of `outcome`."""
        outcomes, self._unreported = (self._unreported, outcome), None
        for each in filter(None, outcomes):
            self.strategy.records.report(self.strategy.steps, each)

    # --- active and evicted children ------------------------------------------------------------------------------
    def active(self) -> list[int]:
        """Return the children that have neither paused nor been evicted in this period."""
        absent = self.evicted.union(self.comm.failures.failed())
        return [child for child in self._stepping if child not in absent]

    def _patience_s(self) -> list[float]:
        """Return after how many seconds `serve_next` must look for children to evict; empty: never."""
        checks = [CHECK_S] if self.comm.failures.tolerant else []
        silent_since = [self.inbox.since_s[child] for child in self.active() if child not in self.inbox.pending]
        if self._deadline_s is not None and silent_since:
            checks.append(max(0.0, min(silent_since) + self._deadline_s - self.comm.now()))
        return checks

    def _evict(self) -> None:
        """Evict children that have failed or been silent for too long: the server no longer waits for them."""
        dead, now_s, deadline_s, newly_evicted = self.comm.failures.failed(), self.comm.now(), self._deadline_s, set()
        for child in self._stepping:
            silent_s = 0.0 if child in self.inbox.pending else now_s - self.inbox.since_s[child]
            if child in self.evicted:
                continue
            if child in dead:
                reason = "it has died"
            elif deadline_s is not None and silent_s >= deadline_s * (1 - 1e-9):  # clocks round
                reason = f"it was silent for {silent_s:.3g} s (learner_deadline_s is {deadline_s:g})"
            else:
                continue
            newly_evicted.add(child)
            self.report(Outcome(self.replica.clock, event=f"goes on without rank {child}: {reason}"))
        if newly_evicted:
            self.evicted |= newly_evicted
            self.apply_due()
