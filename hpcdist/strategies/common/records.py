"""Record the steps of a strategy: clock, staleness, seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from hpcdist.comm.communicator import Communicator, Traffic
from hpcdist.parallel.agreement import PartOfModel
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

    Args:
        part: this rank's part of a model that several ranks hold; their exchanges are counted, too.

    Attributes:
        is_logging: this rank records the samples, losses and staleness of its replica of the model.
        channels: the communicators whose traffic is counted.
        write: receives records that are written outside of `step`, as on servers; None drops them.
        events: returns events to add to the next record.
        pending: returns how many gradients this server has received and not applied yet.
        saved: steps of each rank in the loaded checkpoint, if it is of other ranks, or of ranks with other roles.
    """

    def __init__(self, comm: Communicator, write: Callable[[StepRecord], None] | None, part: PartOfModel | None):
        self.write, self._exchanged = write, Traffic if part is None else part.traffic
        self.is_logging = part is None or part.grid.stage == part.grid.stages - 1
        self.events: Callable[[], list[str]] = list
        self.pending: Callable[[], int] = int
        self.saved: Sequence[int] = ()
        self._comm = comm
        self.channels = [comm]
        self._last = comm.now(), Traffic(), self._exchanged()
        self._kept = Traffic()  # of which no record is written yet, in bytes and messages
        self._in_flight: Traffic | None = None  # from `keep` to `start`: that of calls at `keep`

    def traffic(self, first: int = 0) -> Traffic:
        """Return the strategy's total traffic on this rank so far, on the channels from `first` on."""
        return sum((channel.trace.traffic for channel in self.channels[first:]), Traffic())

    def keep(self) -> None:
        """Let the next record include what was sent since the last one, and what calls in flight send until `start`."""
        self._kept += self.traffic() - self._last[1]
        self._last, self._in_flight = (self._last[0], self.traffic(), self._last[2]), self.traffic(1)

    def start(self) -> None:
        """Start the next record now, so that it excludes the time and traffic of setup, evaluation or checkpoints."""
        if self._in_flight is not None:
            self._kept, self._in_flight = self._kept + (self.traffic(1) - self._in_flight), None
        self._last = self._comm.now(), self.traffic(), self._exchanged()

    def record(self, step: int, outcome: Outcome) -> StepRecord:
        """Return the record of a step; its `computing_s` is time spent neither communicating nor waiting."""
        since, before, exchanged = self._last
        self.start()
        passed_s, inside = self._last[0] - since, self._last[2] - exchanged
        kept, self._kept = replace(self._kept, communicating_s=0.0, waiting_s=0.0), Traffic()
        spent = self._last[1] - before + inside + kept
        if events := self.events():
            outcome = replace(outcome, event="; ".join([*filter(None, [outcome.event]), *events]))
        spent_s = spent.communicating_s + spent.waiting_s
        if spent_s > passed_s:  # with all seconds of a call that was in flight in earlier steps too
            part = passed_s / spent_s
            spent = replace(spent, communicating_s=part * spent.communicating_s, waiting_s=part * spent.waiting_s)
        computing_s = max(0.0, passed_s - spent.communicating_s - spent.waiting_s)
        inside_s = min(inside.communicating_s + inside.waiting_s, passed_s)
        ranks = self._comm.platform.world_ranks
        outcome = replace(outcome, waited_for={ranks[rank]: s for rank, s in outcome.waited_for.items()})
        outcome = outcome if self.is_logging else replace(outcome, staleness=(), dropped=0)
        staged: dict[str, Any] = {"stage_bytes": inside.bytes_sent, "stage_s": inside_s}
        return StepRecord(step=step, computing_s=computing_s, **staged, **vars(outcome), **vars(spent))

    def report_events(self, step: int) -> None:
        """Write a record of pending events, if there are any."""
        if self.write is not None and (events := self.events()):
            self.report(step, Outcome(clock=step, event="; ".join(events)))

    def report(self, step: int, outcome: Outcome) -> None:
        """Write a record outside of `step`."""
        if self.write is not None:
            self.write(self.record(step, outcome))
