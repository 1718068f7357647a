"""Exchanges of all ranks, in the rank's own thread, or in another one while the rank goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from hpcdist import collectives
from hpcdist.comm.communicator import Communicator, beside
from hpcdist.compress import Reduction, Used
from hpcdist.strategies.common.records import Recorder


class Exchanges:
    """Collective. Means over all ranks, which are made one after the other, and used `delay` steps later.

    Where MPI lets a rank have no second thread, the numbers are the same and the time is not saved.

    Args:
        records: of the strategy; they count what is sent.
        algorithm: of the all-reduce.
        delay: steps from sending a part of the parameters to using its mean. With any, another thread makes the
            exchanges, where a rank may have one. Infinite: until the part is sent again.

    Attributes:
        channel: the thread's own communicator.
        reduce: the all-reduce.
        in_flight: the parts that have been sent and not used, by number, each with the step in which it was sent.
    """

    def __init__(self, comm: Communicator, records: Recorder, algorithm: str, delay: float = 0):
        self._comm, self.channel, self._delay = comm, comm.split(0), delay
        records.count(self.channel)
        self.reduce = collectives.load(algorithm)(self.channel)
        self._background = beside(self.channel) if delay > 0 and comm.size > 1 else None
        self.in_flight: dict[int, int] = {}
        self._running: list[int] = []  # those whose mean may not be there yet, in the order of their exchanges

    def mean(self, tensors: Sequence[Tensor], compressed: Reduction | None = None, used: Used = None) -> None:
        """Collective. Replace each rank's tensors by the mean over all ranks, the same to the bit on all of them."""
        if compressed is None:
            average(tensors, self.reduce)
        else:
            compressed.mean(tensors, used)

    def start(self, part: int, step: int, exchange: Callable[[], None]) -> None:
        """Make a part's exchange, or let the other thread make it; its result is there once `complete` has returned."""
        self.in_flight[part] = step
        self._running.append(part)
        if self._background is None:
            exchange()
        else:
            self._background.submit(exchange)

    def due(self, step: int) -> list[int]:
        """Return the parts whose means are used in this step."""
        return sorted(part for part, sent in self.in_flight.items() if sent + self._delay <= step)

    def complete(self, part: int | None = None) -> list[int]:
        """Wait for a part and those sent before it, or for all; the time counts as waiting. Return those that came."""
        if part is not None and part not in self._running:
            return []
        count = len(self._running) if part is None else self._running.index(part) + 1
        if self._background is not None:
            start = self._comm.now()
            self._background.wait(len(self._running) - count)
            self._comm.trace.traffic.waiting_s += self._comm.now() - start
        arrived, self._running = self._running[:count], self._running[count:]
        return arrived

    def close(self, compressed: Sequence[Reduction] = ()) -> None:
        """Collective. Release thread and communicator, and compressed sums on it."""
        if self._background is not None:
            self._background.close()
        for reduction in compressed:
            reduction.close()
        self.reduce.close()
        self.channel.close()


def average(tensors: Sequence[Tensor], reduce: collectives.AllReduce) -> None:
    """Collective. Replace each tensor by its mean over the ranks of `reduce`."""
    for tensor in tensors:
        reduce.mean(tensor)
