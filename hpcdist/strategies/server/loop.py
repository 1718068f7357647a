"""Serve requests in order of arrival until every worker has paused, period after period."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.common.state import State, copy_all
from hpcdist.strategies.server.channel import PAUSE, Reply, ReplyHead, RequestChannel, ServerRequest
from hpcdist.strategies.server.liveness import Liveness
from hpcdist.strategies.server.placement import Placement


class Replica:
    """Count the updates of the parameters in the model, and take new ones from replies, shard by shard.

    The shard of a rank that is worker and server lies in the model already: replies don't change it.

    Attributes:
        clock: updates of this rank's own shard on a server; else of the parameters in the model, of the first shard's.
        clocks: for each parent, updates of the parameters that have come from it.
        applied: staleness of the gradients applied here since this rank's last step, if it is worker and server.
    """

    def __init__(self, place: Placement, model: FlatModel, state: State):
        self._place, self.model = place, model
        others = [place.shards[parent] for parent in place.parents if parent != place.rank]
        self._shards = others if place.colocated else [place.everything]
        self.clock = state.value("clock", 0, self, reshard="max")
        # On another number of ranks all parents have the largest clock.
        self.clocks: list[int] = state.value("clocks", lambda: [self.clock] * len(place.parents), self)
        self.applied: list[int] = []

    def stamps(self) -> list[list[int]]:
        """Return for each parent the clock of its parameters in the model, which goes along with a gradient."""
        parents = zip(self._place.parents, self.clocks, strict=True)
        return [[self.clock if parent == self._place.rank else clock] for parent, clock in parents]

    def take(self, heads: Sequence[ReplyHead], arrived: Sequence[Tensor]) -> None:
        """Copy what has arrived from all parents into the model."""
        for shard in self._shards:
            copy_all(shard.of(self.model.params), shard.of(arrived))
        self._set_clocks([head.clock for head in heads])

    def follow(self, clocks: Sequence[int]) -> None:
        """Take over the clocks of all ranks, whose servers' parameters are in the model now."""
        servers = self._place.roles.servers  # aggregators have one above them
        self._set_clocks([clocks[parent if parent in servers else servers[0]] for parent in self._place.parents])

    def _set_clocks(self, clocks: list[int]) -> None:
        """Keep the clock of each parent's parameters, which are in the model now; a server has no parents."""
        self.clocks = clocks
        if clocks and not self._place.colocated:
            self.clock = clocks[0]

    def take_applied(self) -> tuple[int, ...]:
        """Return the staleness of the gradients applied here since the last call."""
        applied, self.applied = tuple(self.applied), []
        return applied


class Handler(abc.ABC):
    """Handle the requests to one server, and reply to them by way of its loop."""

    @abc.abstractmethod
    def receive(self, request: ServerRequest) -> None:
        """Handle a request; this may reply to it, or to earlier ones, or to none yet."""

    def settle(self) -> None:
        """Handle requests that waited for a worker which has paused, or is evicted."""

    def patience_s(self) -> float | None:
        """Return in how many seconds `settle` is to be called, if no request comes before; None: not at all."""
        return None

    def returned(self, child: int) -> None:
        """Remember that a worker that was evicted has pushed again."""

    @abc.abstractmethod
    def master(self) -> Sequence[Tensor]:
        """Return the parameters of this server's shard, one flat tensor per group."""


class ServerLoop:
    """Give requests to a handler one by one. A request of a worker's next period waits until that begins here too.

    Args:
        deadline_s: how long a worker may push nothing before the others go on without it; None: for ever.
        report: writes a record of this rank, which has taken so many steps since the last one.

    Attributes:
        handler: deals with requests.
        update: runs the local optimiser on the gradients in the model.
    """

    handler: Handler

    def __init__(
        self,
        comm: Communicator,
        place: Placement,
        channel: RequestChannel,
        replica: Replica,
        deadline_s: float | None,
        report: Callable[..., None],
    ):
        self._comm, self._place, self._inbox, self._client = comm, place, channel.inbox, channel.client
        self._report, self.replica = report, replica
        self.liveness = Liveness(place.children, deadline_s)
        self._watches = comm.failures.tolerant or deadline_s is not None
        self.update: Update = lambda: None  # until the first step hands over the local optimiser's
        self._stepping = list(place.children)  # those that have not paused in this period
        self._early: list[ServerRequest] = []  # of children that have begun the next period

    # --- a period of service --------------------------------------------------------------------------------------
    def serve(self, update: Update) -> None:
        """Serve one period, on a rank that only serves."""
        self.begin(update)
        while self.serve_next():
            pass
        self.end()

    def serve_between_steps(self) -> None:
        """Serve the end of one period, on a rank that serves inside its steps, and begin the next one at once."""
        self.begin(self.update)
        while self.serve_next():
            pass
        self._stepping = list(self._place.children)
        self._deal_early()
        if self.replica.applied:
            self._report(Outcome(self.replica.clock, staleness=self.replica.take_applied()))

    def begin(self, update: Update) -> None:
        """Begin a period of service."""
        self.replica.model.refresh()
        if not self._place.colocated:  # what the loop has done to the parameters, such as loading others, it did here
            copy_all(self.handler.master(), self._place.shard.of(self.replica.model.params))
        self.update = update
        self.liveness.expect(self.active(), self._comm.now())
        self._deal_early()

    def serve_next(self, timeout_s: float | None = None) -> bool:
        """Handle the next request, if one comes in time; return False once every worker has paused."""
        dead = self._comm.failures.failed()
        if all(child in dead for child in self._stepping):
            return False
        if self._watches:
            patience_s = self.liveness.patience_s(self.active(), self._comm.now(), self._comm.failures.tolerant)
            timeout_s = min((s for s in (timeout_s, patience_s) if s is not None), default=None)
        due_s = self.handler.patience_s()
        if due_s is not None:
            timeout_s = due_s if timeout_s is None else min(timeout_s, due_s)
        request = self._inbox.next(timeout_s)
        if request is not None:
            self._deal(request)
        elif due_s is not None:
            self.handler.settle()
        if self._watches:
            self._evict()
        return True

    def serve_waiting(self) -> None:
        """Block until there is a request or this rank has its own replies; deal with all requests that are here."""
        self._inbox.wait_event()
        while (request := self._inbox.poll()) is not None:
            self._deal(request)

    def end(self) -> None:
        """End a period of service. The model gets what is served, for loops whose rank 0 evaluates or saves it.

        Requests that came early wait for the next period.
        """
        self._stepping = list(self._place.children)
        self.show()
        if self._place.aggregates:
            self._client.push(PAUSE)
            self._client.wait()

    def show(self) -> None:
        """Copy the parameters that are served into the model."""
        copy_all(self._place.shard.of(self.replica.model.params), self.handler.master())

    def _deal_early(self) -> None:
        """Handle requests of this period that came before it began here."""
        early, self._early = self._early, []
        for request in early:
            self._deal(request)

    def _deal(self, request: ServerRequest) -> None:
        """Count a pause, keep a request of the next period, and give all others to the handler."""
        child = request.source
        if self._watches and self.liveness.heard(child):
            self._report(Outcome(self.replica.clock, event=f"rank {child} is back"))
            self.handler.returned(child)
        if child not in self._stepping:
            self._early.append(request)
        elif request.kind == PAUSE:
            self._stepping.remove(child)
            self.reply(Reply(request, self.replica.clock))
            self.handler.settle()
        else:
            with self._comm.trace.span(f"request of rank {child}", "server", clock=self.replica.clock):
                self.handler.receive(request)

    # --- who takes part -------------------------------------------------------------------------------------------
    def active(self) -> list[int]:
        """Return the children that still take steps in this period: they have neither paused nor been evicted."""
        gone = self.liveness.evicted.union(self._comm.failures.failed())
        return [child for child in self._stepping if child not in gone]

    def _evict(self) -> None:
        """Go on without workers that have died or been silent for too long."""
        stepping = [child for child in self._stepping if child not in self.liveness.evicted]
        found = self.liveness.evict(stepping, self._comm.failures.failed(), self._comm.now())
        for child, reason in found.items():
            self._report(Outcome(self.replica.clock, event=f"goes on without rank {child}: {reason}"))
        if found:
            self.handler.settle()

    # --- what a handler calls -------------------------------------------------------------------------------------
    def reply(self, *replies: Reply) -> None:
        """Reply to requests; from now on their workers are expected to push the next ones."""
        self._inbox.reply(*replies)
        for reply in replies if self._watches else ():
            self.liveness.replied(reply.request.source, self._comm.now())

    def drop(self, request: ServerRequest, reason: str) -> None:
        """Record that a request's gradients are not applied."""
        self._report(Outcome(self.replica.clock, event=reason, dropped=len(request.clocks)))

    def count_update(self, staleness: Sequence[int] = ()) -> None:
        """Count an update of gradients of that staleness, and record it where no step of this rank will."""
        self.replica.clock += 1
        if self._place.colocated:
            self.replica.applied += staleness
        else:
            self._report(Outcome(self.replica.clock, staleness=tuple(staleness)), steps=1)
