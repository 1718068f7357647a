"""Collective calls of virtual ranks: their meeting, and the formulas for the time that each call takes.

p ranks, latency a, bandwidth b, n bytes, lg = log2 rounded up. Times count from the last rank's arrival, and all ranks
leave together. These calls stand for the MPI library's own: they don't queue at the links, and what they put on the
network is counted by the formula.

=========  =====================================  ==========================================
call       time                                   bytes and messages sent by one rank
=========  =====================================  ==========================================
allreduce  2(p-1) a + 2n(p-1)/p / b  (ring)       2n(p-1)/p in 2(p-1)
broadcast  lg p (a + n/b)  (binomial tree)        n to each of its children in the tree
exchange   (p-1) (a + longest/b)  (ring)          its own data p-1 times
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
    """The meeting of a communicator's ranks for a collective call; ranks that make different calls end the run."""

    def __init__(self, clock: VirtualClock, ranks: list[VirtualRank]):
        self._clock, self.ranks = clock, ranks
        self.call = ""
        self.given: dict[int, Any] = {}  # what each rank brought that is here
        self._waiting: dict[int, VirtualRank] = {}  # their threads
        self._taken: list = []  # what each will take away

    def synchronize(
        self, rank: int, call: str, given: Any, conclude: Callable[[list], tuple[list, float]], deadline_s: float
    ) -> Any:
        """Block until all ranks are here and the call's time is over; return this rank's item of `conclude`'s result.

        Args:
            rank: who calls, by its rank in the communicator.
            call: the call in words, with everything that must be the same on all ranks.
            given: what this rank brings.
            conclude: gets what all brought, in rank order; returns what each takes away, and the seconds it takes.
        """
        if not self.given:
            self.call = call
        elif call != self.call:
            raise MismatchError(self._disagreement(rank, call))
        self.given[rank] = given
        me, taken = self._clock.running(self.ranks[rank].rank), self._taken
        self._waiting[rank] = me

        def start() -> None:
            if len(self.given) == len(self.ranks):
                everything = [self.given[r] for r in range(len(self.ranks))]
                waiting, self.given, self._taken, self._waiting = self._waiting, {}, [], {}
                result, duration_s = conclude(everything)
                taken.extend(result)
                for member in range(len(self.ranks)):  # whoever came first
                    self._clock.wake(waiting[member], self._clock.now_s + duration_s)

        self._clock.block(me, _Missing(self), deadline_s, start)
        return taken[rank]

    def _disagreement(self, rank: int, call: str) -> str:
        first = self.ranks[next(iter(self.given))]
        me = self.ranks[rank]
        return (
            f"collective calls must be the same on all ranks; got {self.call} on rank {first.rank}, "
            f"{self._clock.where(first)}, and {call} on rank {me.rank}, {self._clock.where(me)}. "
            "Make the same calls in the same order, with the same lengths and dtypes, on every rank."
        )


class _Missing:
    """A description of the missing ranks, made when it is printed."""

    def __init__(self, gathering: Gathering):
        self._gathering = gathering

    def __str__(self) -> str:
        missing = [str(m.rank) for r, m in enumerate(self._gathering.ranks) if r not in self._gathering.given]
        return f"{self._gathering.call}: rank{'s' * (len(missing) > 1)} {', '.join(missing)} missing"


def sum_in_rank_order(tensors: list[Tensor]) -> Tensor:
    """Sum tensors as ((x0 + x1) + x2) + ..., 16-bit floats in float32."""
    total = tensors[0].to(WIDE.get(tensors[0].dtype, tensors[0].dtype), copy=True)
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total.to(tensors[0].dtype)


def rounds(size: int) -> int:
    """Compute log2 of the number of ranks, rounded up."""
    return (size - 1).bit_length()


def children(rank: int, root: int, size: int) -> int:
    """Count the children of a rank in the binomial tree of a broadcast."""
    place = (rank - root) % size
    return sum(place + (1 << k) < size for k in range(place.bit_length(), rounds(size)))
