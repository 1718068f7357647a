"""Serve requests in order of arrival until every worker has paused, period after period."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from hpcdist.comm.communicator import Communicator
from hpcdist.model.flat import FlatModel
from hpcdist.strategies.base import Outcome, Update
from hpcdist.strategies.common.state import Entry
from hpcdist.strategies.server.channel import CHECK_S, PAUSE, Inbox, Reply, ServerRequest
from hpcdist.strategies.server.placement import Placement


class Liveness:
    """Remember since when each worker owes a request, and who is evicted because of that. Holds no clock of its own.

    Args:
        deadline_s: how long a worker may be silent; None: for ever.
    """

    def __init__(self, workers: Iterable[int], deadline_s: float | None):
        self.deadline_s = deadline_s
        self.evicted: set[int] = set()
        self._since: dict[int, float] = dict.fromkeys(workers, 0.0)
        self._heard: set[int] = set()  # whose request waits for its reply

    def expect(self, workers: Iterable[int], now: float) -> None:
        """Expect a request of each of these workers, from `now` on."""
        self._since.update(dict.fromkeys(workers, now))

    def heard(self, worker: int) -> bool:
        """Remember that a request has come; return whether the worker had been evicted, which it no longer is."""
        self._heard.add(worker)
        if worker not in self.evicted:
            return False
        self.evicted.remove(worker)
        return True

    def replied(self, worker: int, now: float) -> None:
        """Remember that the worker has its reply, so that it owes the next request."""
        self._heard.discard(worker)
        self._since[worker] = now

    def patience_s(self, active: Iterable[int], now: float, watches: bool) -> float | None:
        """Return the seconds after which to `evict` again; None: no request is ever too late.

        Args:
            watches: whether a rank's death would be survived, so that it is worth looking for.
        """
        owed = [self._since[worker] for worker in active if worker not in self._heard]
        if self.deadline_s is None or not owed:
            return CHECK_S if watches else None
        left_s = max(0.0, min(owed) + self.deadline_s - now)
        return min(CHECK_S, left_s) if watches else left_s

    def evict(self, active: Iterable[int], dead: Iterable[int], now: float) -> dict[int, str]:
        """Evict those of the active workers that are dead or silent for too long; return why."""
        found = {}
        for worker in active:
            silent_s = 0.0 if worker in self._heard else now - self._since[worker]
            if worker in dead:
                found[worker] = "it has died"
            elif self.deadline_s is not None and silent_s >= self.deadline_s * (1 - 1e-9):  # clocks round
                found[worker] = f"it was silent for {silent_s:.3g} s (learner_deadline_s is {self.deadline_s:g})"
        self.evicted.update(found)
        return found


class Handler(abc.ABC):
    """Handle the requests to one server, and reply to them by way of its loop."""

    @abc.abstractmethod
    def receive(self, request: ServerRequest) -> None:
        """Handle a request; this may reply to it, or to earlier ones, or to none yet."""

    def settle(self) -> None:
        """Handle requests that waited for a worker which has paused, or is evicted."""

    def returned(self, child: int) -> None:
        """Remember that a worker that was evicted has pushed again."""

    @abc.abstractmethod
    def master(self) -> Sequence[Tensor]:
        """Return the parameters of this server's shard, one flat tensor per group."""

    @property
    def pending(self) -> int:
        """Count the gradients that have been taken and that no update has applied yet."""
        return 0

    def entries(self) -> Iterable[Entry]:
        """Declare the server's state, beside the parameters in its model."""
        return ()


class ServerLoop:
    """Give requests to a handler one by one. A request of a worker's next period waits until that begins here too.

    Args:
        deadline_s: how long a worker may push nothing before the others go on without it; None: for ever.
        report: writes a record of this rank, which has taken so many steps since the last one.

    Attributes:
        clock: updates of this rank's shard.
        applied: staleness of the gradients applied since this rank's last step, if it is a worker too.
        update: runs the local optimiser on the gradients in the model.
    """

    handler: Handler

    def __init__(
        self,
        comm: Communicator,
        place: Placement,
        inbox: Inbox,
        model: FlatModel,
        deadline_s: float | None,
        report: Callable[..., None],
    ):
        self._comm, self._place, self._inbox, self._model, self._report = comm, place, inbox, model, report
        self.liveness = Liveness(place.children, deadline_s)
        self._watches = comm.failures.tolerant or deadline_s is not None
        self.clock, self.applied = 0, []
        self.update: Update = _none_yet
        self._stepping = list(place.children)  # those that have not paused in this period
        self._early: list[ServerRequest] = []  # of children that have begun the next period

    # --- a period of service --------------------------------------------------------------------------------------
    def serve_until_paused(self, update: Update) -> None:
        """Serve one period, but for its end."""
        self.begin(update)
        while self.serve_next():
            pass

    def begin(self, update: Update) -> None:
        """Begin a period of service."""
        self._model.refresh()
        if not self._place.colocated:  # what the loop has done to the parameters, such as loading others, it did here
            self.take_up()
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
        request = self._inbox.next(timeout_s)
        if request is not None:
            self._deal(request)
        if self._watches:
            self._evict()
        return True

    def serve_waiting(self) -> None:
        """Block until there is a request or this rank has its own replies; deal with all requests that are here."""
        self._inbox.wait_event()
        while (request := self._inbox.poll()) is not None:
            self._deal(request)

    def end(self) -> None:
        """End a period of service. The model gets what is served, for loops whose rank 0 evaluates or saves it."""
        self._stepping = list(self._place.children)
        self.show()

    def begin_next(self) -> None:
        """Go over to the next period at once: on a rank that serves inside its steps."""
        self._stepping = list(self._place.children)
        self._deal_early()

    def take_up(self) -> None:
        """Serve the parameters that are in the model."""
        for served, own in zip(self.handler.master(), self._place.shard.of(self._model.params), strict=True):
            served.copy_(own)

    def show(self) -> None:
        """Copy the parameters that are served into the model."""
        for own, served in zip(self._place.shard.of(self._model.params), self.handler.master(), strict=True):
            own.copy_(served)

    def _deal_early(self) -> None:
        """Handle requests of this period that came before it began here."""
        early, self._early = self._early, []
        for request in early:
            self._deal(request)

    def _deal(self, request: ServerRequest) -> None:
        """Count a pause, keep a request of the next period, and give all others to the handler."""
        child = request.source
        if self._watches and self.liveness.heard(child):
            self._report(Outcome(self.clock, event=f"rank {child} is back"))
            self.handler.returned(child)
        if child not in self._stepping:
            self._early.append(request)
        elif request.kind == PAUSE:
            self._stepping.remove(child)
            self.reply(Reply(request, self.clock))
            self.handler.settle()
        else:
            with self._comm.trace.span(f"request of rank {child}", "server", clock=self.clock):
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
            self._report(Outcome(self.clock, event=f"goes on without rank {child}: {reason}"))
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
        self._report(Outcome(self.clock, event=reason, dropped=len(request.clocks)))

    def count_update(self, staleness: Sequence[int] = ()) -> None:
        """Count an update of gradients of that staleness, and record it where no step of this rank will."""
        self.clock += 1
        if self._place.colocated:
            self.applied += staleness
        else:
            self._report(Outcome(self.clock, staleness=tuple(staleness)), steps=1)

    def take_applied(self) -> tuple[int, ...]:
        """Return the staleness of the gradients applied here since this rank's last step."""
        applied, self.applied = tuple(self.applied), []
        return applied


def _none_yet() -> None:
    """Do nothing, in the place of the local optimiser, until the first step hands it over."""
