"""Record the steps of a strategy: clock, staleness, seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hpcdist.comm.communicator import Communicator, Traffic
from hpcdist.records import StepRecord


@dataclass(frozen=True)
class Outcome:
    """The outcome of one step of a strategy.

    Attributes:
        clock: number of updates of the parameters that this rank now has.
        staleness: one entry per gradient applied on this rank.
        event: anything out of the ordinary, as a sentence.
        dropped: number of gradients that were too stale.
        waited_for: seconds that a server held this rank up because of each other rank.
    """

    clock: int
    staleness: tuple[int, ...] = ()
    event: str | None = None
    dropped: int = 0
    waited_for: dict[int, float] = field(default_factory=dict)


class Recorder:
    """Make a record of all that has happened since the last record of this rank.

    Attributes:
        channels: the communicators whose traffic counts.
        write: receives records that are made outside of `step`, as on servers; None drops them.
        remarks: returns events to add to the next record.
        pending: counts the gradients that this rank, a server, has taken and that no update has applied yet.
    """

    def __init__(self, comm: Communicator, write: Callable[[StepRecord], None] | None = None):
        self.write = write
        self.remarks: Callable[[], list[str]] = list
        self.pending: Callable[[], int] = int
        self._comm = comm
        self.channels = [comm]
        self._since, self._before = comm.now(), Traffic()

    def count(self, channel: Communicator) -> None:
        """Count the traffic of another communicator of the strategy, too."""
        self.channels.append(channel)

    def traffic(self) -> Traffic:
        """Return all that the strategy has sent and received so far, on this rank."""
        return sum((channel.trace.traffic for channel in self.channels), Traffic())

    def start(self) -> None:
        """Begin the next record now: setting up, an evaluation or a checkpoint before are left out of it."""
        self._since, self._before = self._comm.now(), self.traffic()

    def record(self, step: int, outcome: Outcome) -> StepRecord:
        """Return the record of a step; its `computing_s` is time spent neither communicating nor waiting."""
        now, traffic = self._comm.now(), self.traffic()
        spent, passed_s = traffic - self._before, now - self._since
        self._since, self._before = now, traffic
        if remarks := self.remarks():
            outcome = replace(outcome, event="; ".join([*filter(None, [outcome.event]), *remarks]))
        return StepRecord(
            step=step,
            clock=outcome.clock,
            staleness=outcome.staleness,
            event=outcome.event,
            dropped=outcome.dropped,
            waited_for=outcome.waited_for,
            computing_s=max(0.0, passed_s - spent.communicating_s - spent.waiting_s),
            **vars(spent),
        )

    def report_remarks(self, step: int) -> None:
        """Write a record of the remarks that no step has recorded, where there are any."""
        if self.write is not None and (remarks := self.remarks()):
            self.report(step, Outcome(clock=step, event="; ".join(remarks)))

    def report(self, step: int, outcome: Outcome) -> None:
        """Write a record that belongs to no call of `step`."""
        if self.write is not None:
            self.write(self.record(step, outcome))
