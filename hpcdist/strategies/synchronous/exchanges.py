"""Exchanges of all ranks, in the rank's own thread, or in another one while the rank goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from hpcdist import collectives
from hpcdist.comm.communicator import Communicator, beside
from hpcdist.compress import Reduction, Used
from hpcdist.strategies.common.records import Recorder


class Exchanges:
    """Collective. Means over all ranks, which are made one after the other.

    Where MPI lets a rank have no second thread, the numbers are the same and the time is not saved.

    Args:
        records: of the strategy; they count what is sent.
        algorithm: of the all-reduce.
        aside: make them in another thread, where a rank may have one.

    Attributes:
        channel: the thread's own communicator.
        reduce: the all-reduce.
    """

    def __init__(self, comm: Communicator, records: Recorder, algorithm: str, aside: bool):
        self._comm, self.channel = comm, comm.split(0)
        records.count(self.channel)
        self.reduce = collectives.load(algorithm)(self.channel)
        self._background = beside(self.channel) if aside and comm.size > 1 else None

    def mean(self, tensors: Sequence[Tensor], compressed: Reduction | None = None, used: Used = None) -> None:
        """Collective. Replace each rank's tensors by the mean over all ranks, the same to the bit on all of them."""
        if compressed is None:
            average(tensors, self.reduce)
        else:
            compressed.mean(tensors, used)

    def begin(self, exchange: Callable[[], None]) -> None:
        """Make an exchange, or let the other thread make it; valid once `wait` has returned."""
        if self._background is None:
            exchange()
        else:
            self._background.submit(exchange)

    def wait(self, left: int = 0) -> None:
        """Wait for the exchanges under way, but for the last `left` ones; the time counts as waiting."""
        if self._background is not None:
            start = self._comm.now()
            self._background.wait(left)
            self._comm.trace.traffic.waiting_s += self._comm.now() - start

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
