"""Record the steps of a strategy: clock, staleness, seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from hpcdist.comm.communicator import Communicator, Traffic
from hpcdist.records import StepRecord


@dataclass(frozen=True)
class Outcome:
    """The outcome of one step of a strategy.

    Attributes:
        clock: number of updates that this rank's parameters have had.
        staleness: one entry per gradient applied on this rank.
        event: an unusual event, as a sentence.
        dropped: number of gradients that were dropped as too stale.
        waited_for: seconds of waiting by the rank that caused it, as a server reported them.
    """

    clock: int
    staleness: tuple[int, ...] = ()
    event: str | None = None
    dropped: int = 0
    waited_for: dict[int, float] = field(default_factory=dict)


@contextmanager
def waiting_for_work(comm: Communicator) -> Iterator[None]:
    """Context: count its time as waiting, except what a thread on `comm` counts meanwhile."""
    traffic = comm.trace.traffic
    start_s = comm.now() - traffic.communicating_s - traffic.waiting_s
    yield
    traffic.waiting_s += max(0.0, comm.now() - traffic.communicating_s - traffic.waiting_s - start_s)


class Recorder:
    """Creates a record for each step of this rank: time, traffic and events since its last record.

    Attributes:
        channels: the communicators whose traffic is counted.
        write: receives records that are written outside of `step`, as on servers; None drops them.
        events: returns events to add to the next record.
        pending: returns how many gradients this server has received and not applied yet.
    """

    def __init__(self, comm: Communicator, write: Callable[[StepRecord], None] | None = None):
        self.write = write
        self.events: Callable[[], list[str]] = list
        self.pending: Callable[[], int] = int
        self._comm = comm
        self.channels = [comm]
        self._since, self._before = comm.now(), Traffic()

    def traffic(self) -> Traffic:
        """Return the strategy's total traffic on this rank so far."""
        return sum((channel.trace.traffic for channel in self.channels), Traffic())

    def start(self) -> None:
        """Start the next record now, so that it excludes the time and traffic of setup, evaluation or checkpoints."""
        self._since, self._before = self._comm.now(), self.traffic()

    def record(self, step: int, outcome: Outcome) -> StepRecord:
        """Return the record of a step; its `computing_s` is time spent neither communicating nor waiting."""
        now, traffic = self._comm.now(), self.traffic()
        spent, passed_s = traffic - self._before, now - self._since
        self._since, self._before = now, traffic
        if events := self.events():
            outcome = replace(outcome, event="; ".join([*filter(None, [outcome.event]), *events]))
        spent_s = spent.communicating_s + spent.waiting_s
        if spent_s > passed_s:  # with all seconds of a call that was in flight in earlier steps too
            part = passed_s / spent_s
            spent = replace(spent, communicating_s=part * spent.communicating_s, waiting_s=part * spent.waiting_s)
        computing_s = max(0.0, passed_s - spent.communicating_s - spent.waiting_s)
        return StepRecord(step=step, computing_s=computing_s, **vars(outcome), **vars(spent))

    def report_events(self, step: int) -> None:
        """Write a record of pending events, if there are any."""
        if self.write is not None and (events := self.events()):
            self.report(step, Outcome(clock=step, event="; ".join(events)))

    def report(self, step: int, outcome: Outcome) -> None:
        """Write a record outside of `step`."""
        if self.write is not None:
            self.write(self.record(step, outcome))
