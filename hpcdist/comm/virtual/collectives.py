"""Collective calls of virtual ranks: how ranks synchronize, and the formulas for the time of each call.

p ranks, latency a, bandwidth b, n bytes, lg = log2 rounded up. Times count from the last rank's arrival, and all ranks
return at the same time. These calls model the MPI library's: they don't queue at the links, and their traffic is
counted by the formulas.

=========  =====================================  ==========================================
call       time                                   bytes and messages sent by one rank
=========  =====================================  ==========================================
allreduce  2(p-1) a + 2n(p-1)/p / b  (ring)       2n(p-1)/p in 2(p-1)
broadcast  lg p (a + n/b)  (binomial tree)        n to each of its children in the tree
exchange   (p-1) (a + longest/b)  (ring)          its local data p-1 times
others     lg p a  (dissemination)                nothing in lg p
=========  =====================================  ==========================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hpcdist.comm.transfer import WIDE
from hpcdist.comm.virtual.clock import VirtualClock, VirtualRank
from hpcdist.errors import MismatchError


class Gathering:
    """Synchronizes a communicator's ranks for a collective call; raises MismatchError if their calls differ."""

    def __init__(self, clock: VirtualClock, ranks: list[VirtualRank]):
        self._clock, self.ranks = clock, ranks
        self.call = ""
        self.inputs: dict[int, Any] = {}  # by rank, for the ranks that have arrived
        self._waiting: dict[int, VirtualRank] = {}  # their threads
        self._results: list = []  # of the call in progress, by rank

    def synchronize(
        self, rank: int, call: str, value: Any, conclude: Callable[[list], tuple[list, float]], deadline_s: float
    ) -> Any:
        """Block until all ranks have arrived and the call's time has passed; return this rank's result.

        Args:
            rank: the calling rank, by its number in the communicator.
            call: description of the call, with everything that must be the same on all ranks.
            value: this rank's input.
            conclude: maps the inputs in rank order to the results in rank order, and the seconds that the call takes.
            deadline_s: virtual seconds after which DeadlineError is raised.
        """
        if not self.inputs:
            self.call = call
        elif call != self.call:
            raise MismatchError(self._disagreement(rank, call))
        self.inputs[rank] = value
        # The last rank to arrive fills `results`, which all ranks of this call hold, and resets the attributes.
        me, results = self._clock.running(self.ranks[rank].rank), self._results
        self._waiting[rank] = me

        def start() -> None:
            if len(self.inputs) == len(self.ranks):
                inputs = [self.inputs[r] for r in range(len(self.ranks))]
                waiting, self.inputs, self._results, self._waiting = self._waiting, {}, [], {}
                concluded, duration_s = conclude(inputs)
                results.extend(concluded)
                for member in range(len(self.ranks)):  # in rank order, not in order of arrival
                    self._clock.wake(waiting[member], self._clock.now_s + duration_s)

        self._clock.block(me, self, deadline_s, start)
        return results[rank]

    def __str__(self) -> str:
        """Describe the call in progress and the missing ranks, for messages of ranks that wait."""
        missing = [str(m.rank) for r, m in enumerate(self.ranks) if r not in self.inputs]
        return f"{self.call}: rank{'s' * (len(missing) > 1)} {', '.join(missing)} missing"

    def _disagreement(self, rank: int, call: str) -> str:
        first = self.ranks[next(iter(self.inputs))]
        me = self.ranks[rank]
        return (
            f"collective calls must be the same on all ranks; got {self.call} on rank {first.rank}, "
            f"{self._clock.where(first)}, and {call} on rank {me.rank}, {self._clock.where(me)}. "
            "Make the same calls in the same order, with the same lengths and dtypes, on every rank."
        )


def sum_in_rank_order(tensors: list[Tensor]) -> Tensor:
    """Return ((x0 + x1) + x2) + ...; 16-bit floats are added in float32."""
    total = tensors[0].to(WIDE.get(tensors[0].dtype, tensors[0].dtype), copy=True)
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total.to(tensors[0].dtype)


def rounds(size: int) -> int:
    """Return log2 of the number of ranks, rounded up."""
    return (size - 1).bit_length()


def children(rank: int, root: int, size: int) -> int:
    """Return the number of a rank's children in the binomial tree of a broadcast."""
    relative = (rank - root) % size
    return sum(relative + (1 << k) < size for k in range(relative.bit_length(), rounds(size)))
