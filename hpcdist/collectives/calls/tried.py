"""Two ways to make a long call, and which of them is faster: tried in turn on the first calls of about that length."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter as clock

import torch
from torch import Tensor

from hpcdist.collectives.calls.exchange import Exchange
from hpcdist.collectives.calls.prepared import PreparedCall

TRIALS = 4  # of each way, of which the first does not count


class FasterWay:
    """What is known of several ways; the same on all ranks, who make the same calls in the same order."""

    def __init__(self, exchange: Exchange, ways: int):
        self._exchange, self._taken_s = exchange, [list[float]() for _ in range(ways)]
        self._fastest: int | None = None

    def way(self) -> int:
        """Return the number of the way that the next call takes."""
        if self._fastest is not None:
            return self._fastest
        return min(range(len(self._taken_s)), key=lambda way: len(self._taken_s[way]))

    def note(self, way: int, seconds: float) -> None:
        """Collective. Note how long a call took; choose once all ways have been tried."""
        if self._fastest is not None:
            return
        self._taken_s[way].append(seconds)
        if all(len(taken_s) == TRIALS for taken_s in self._taken_s):
            own = torch.tensor([min(taken_s[1:]) for taken_s in self._taken_s])
            self._fastest = int(torch.stack(self._exchange.show_all(own)).amax(0).argmin())


class TriedCall(PreparedCall):
    """A call that takes the faster way, once that is known.

    Args:
        ways: which all do the same.
        faster: of all calls of about this length.
    """

    def __init__(self, ways: Sequence[PreparedCall], faster: FasterWay):
        self._ways, self._faster = ways, faster

    def __call__(self, *tensors: Tensor) -> bool:
        start, way = clock(), self._faster.way()
        if not self._ways[way](*tensors):
            return False
        self._faster.note(way, clock() - start)
        return True
