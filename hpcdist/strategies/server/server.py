"""Serve requests in order of arrival until every worker has paused, period after period."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from torch import Tensor

from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Outcome, Strategy, Update
from hpcdist.strategies.common.state import State, copy_all
from hpcdist.strategies.server.channel import CHECK_S, PAUSE, Replies, Reply, RequestChannel, ServerRequest
from hpcdist.strategies.server.placement import Placement


class Replica:
    """Count the updates of the parameters in the model, and take new ones from replies, shard by shard.

    The shard of a rank that is worker and server lies in the model already: replies don't change it.

    Attributes:
        place: what this rank serves, and for which ranks.
        channel: requests and replies, where there is more than one rank.
        clock: updates of this rank's own shard on a server; else of the parameters in the model, of the first shard's.
        clocks: for each parent, updates of the parameters that have come from it.
    """

    channel: RequestChannel

    def __init__(self, place: Placement, model: FlatModel, state: State):
        self.place, self._model = place, model
        others = [place.shards[parent] for parent in place.parents if parent != place.rank]
        self._shards = others if place.colocated else [place.everything]
        self.clock = state.value("clock", 0, self, reshard="max")
        # On another number of ranks all parents have the largest clock.
        self.clocks: list[int] = state.value("clocks", lambda: [self.clock] * len(place.parents), self)

    def pull(self) -> Replies:
        """Wait for the replies of all parents, and copy their parameters into the model."""
        replies = self.channel.client.wait()
        for shard in self._shards:
            copy_all(shard.of(self._model.params), shard.of(self.channel.down.whole))
        self.follow(replies.clocks)
        return replies

    def follow(self, clocks: list[int]) -> None:
        """Keep the clock of each parent's parameters, which are in the model now; a server has no parents."""
        self.clocks = clocks
        if clocks and not self.place.colocated:
            self.clock = clocks[0]


class Server(abc.ABC):
    """Serve the requests of this rank's children one by one; a subclass decides what is due.

    A request of a worker's next period waits until that begins here too.

    Args:
        deadline_s: how long a worker may be silent; None: forever.

    Attributes:
        held: requests that wait for their reply, in order of arrival.
        due_s: when `apply_due` is to be called, if no request comes before; None: not at all.
        evicted: workers that have died, or have pushed nothing for `deadline_s`: the others go on without them.
        update: runs the local optimiser on the gradients in the model.
        applied: staleness of the gradients applied here since this rank's last step, if it is worker and server.
    """

    def __init__(self, strategy: Strategy, replica: Replica, deadline_s: float | None):
        self.strategy, self.comm, self.model = strategy, strategy.comm, strategy.model
        self.replica, self.place, self.channel = replica, replica.place, replica.channel
        self.inbox, self._deadline_s = self.channel.inbox, deadline_s
        self._watches = self.comm.failures.tolerant or self._deadline_s is not None
        self.held: list[ServerRequest] = []
        self.due_s: float | None = None
        self.evicted: set[int] = set()
        self.update: Update = lambda: None  # until the first step hands over the local optimiser's
        self.applied: list[int] = []
        self._stepping = list(self.place.children)  # those that have not paused in this period
        self._early: list[ServerRequest] = []  # of children that have begun the next period

    # --- what a subclass defines ----------------------------------------------------------------------------------
    @abc.abstractmethod
    def apply_due(self) -> None:
        """Deal with the held requests that are due, and reply to them; a worker may have paused, or been evicted."""

    def holds(self, request: ServerRequest) -> bool:
        """Tell whether to hold a request until it is due; one that is refused has its reply then."""
        return True

    def returned(self, child: int) -> None:
        """Remember that a worker that was evicted has pushed again."""

    def master(self) -> Sequence[Tensor]:
        """Return the parameters of this server's shard, one flat tensor per group."""
        return self.place.shard.of(self.model.params)

    # --- a period of service --------------------------------------------------------------------------------------
    def serve(self, update: Update) -> None:
        """Serve one period, on a rank that only serves."""
        self.start(update)
        while self.serve_next():
            pass
        self.end()

    def serve_between_steps(self) -> None:
        """Serve the end of one period, on a rank that serves inside its steps, and begin the next one at once."""
        self.start(self.update)
        while self.serve_next():
            pass
        self._stepping = list(self.place.children)
        self._deal_early()
        if self.applied:
            self.report(Outcome(self.replica.clock, staleness=tuple(self.applied)))
            self.applied = []

    def start(self, update: Update) -> None:
        """Begin a period of service."""
        self.model.refresh()
        if not self.place.colocated:  # what the loop has done to the parameters, such as loading others, it did here
            copy_all(self.master(), self.place.shard.of(self.model.params))
        self.update = update
        self.inbox.since_s.update(dict.fromkeys(self.active(), self.comm.now()))
        self._deal_early()

    def serve_next(self, timeout_s: float | None = None) -> bool:
        """Handle the next request, if one comes in time; return False once every worker has paused."""
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
        return True

    def serve_waiting(self) -> None:
        """Block until there is a request or this rank has its own replies; deal with all requests that are here."""
        self.inbox.wait_event()
        while (request := self.inbox.poll()) is not None:
            self._deal(request)

    def end(self) -> None:
        """End a period of service. The model gets what is served, for loops whose rank 0 evaluates or saves it.

        Requests that came early wait for the next period.
        """
        self._stepping = list(self.place.children)
        self.show()
        if self.place.aggregates:
            self.channel.client.push(PAUSE)
            self.channel.client.wait()

    def show(self) -> None:
        """Copy the parameters that are served into the model."""
        copy_all(self.place.shard.of(self.model.params), self.master())

    def _deal_early(self) -> None:
        """Handle requests of this period that came before it began here."""
        early, self._early = self._early, []
        for request in early:
            self._deal(request)

    def receive(self, request: ServerRequest) -> None:
        """Hold a request, unless it is refused, and deal with what is due."""
        if self.holds(request):
            self.held.append(request)
            self.apply_due()

    def _deal(self, request: ServerRequest) -> None:
        """Count a pause, keep a request of the next period, and receive all others."""
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
        """Count an update of gradients of that staleness, and record it where no step of this rank will."""
        self.replica.clock += 1
        if self.place.colocated:
            self.applied += staleness
        else:
            self.strategy.steps += 1
            self.report(Outcome(self.replica.clock, staleness=tuple(staleness)))

    def report(self, outcome: Outcome) -> None:
        """Write a record of this rank."""
        self.strategy.records.report(self.strategy.steps, outcome)

    # --- who takes part -------------------------------------------------------------------------------------------
    def active(self) -> list[int]:
        """Return the children that still take steps in this period: they have neither paused nor been evicted."""
        gone = self.evicted.union(self.comm.failures.failed())
        return [child for child in self._stepping if child not in gone]

    def _patience_s(self) -> list[float]:
        """Return in how many seconds to look again for workers to evict, if at all."""
        looks = [CHECK_S] if self.comm.failures.tolerant else []
        owed = [self.inbox.since_s[child] for child in self.active() if child not in self.inbox.unanswered]
        if self._deadline_s is not None and owed:
            looks.append(max(0.0, min(owed) + self._deadline_s - self.comm.now()))
        return looks

    def _evict(self) -> None:
        """Go on without workers that have died or been silent for too long."""
        dead, now_s, deadline_s, found = self.comm.failures.failed(), self.comm.now(), self._deadline_s, set()
        for child in self._stepping:
            silent_s = 0.0 if child in self.inbox.unanswered else now_s - self.inbox.since_s[child]
            if child in self.evicted:
                continue
            if child in dead:
                reason = "it has died"
            elif deadline_s is not None and silent_s >= deadline_s * (1 - 1e-9):  # clocks round
                reason = f"it was silent for {silent_s:.3g} s (learner_deadline_s is {deadline_s:g})"
            else:
                continue
            found.add(child)
            self.report(Outcome(self.replica.clock, event=f"goes on without rank {child}: {reason}"))
        if found:
            self.evicted |= found
            self.apply_due()
