"""Timing several ways of doing the same, so that they can be compared on a noisy machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from hpcdist.comm.communicator import Communicator

Sides = Mapping[str, Callable[[Tensor], object]]  # what to time, by name


def interleaved(
    comm: Communicator, sides: Sides, tensor: Tensor, rounds: int, calls: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """Collective. Time the sides in turns; return seconds per call by side and round, of the slowest rank.

    Args:
        sides: the same names in the same order on all ranks.
        tensor: handed to every call.
        rounds: how often each side is timed.
        calls: how many calls one timing of a side covers; by default one.
    """
    taken_s: dict[str, list[float]] = {name: [] for name in sides}
    for name in in_turn(sides, rounds):
        side, times = sides[name], calls[name] if calls else 1
        comm.barrier()
        start = comm.now()
        for _ in range(times):
            side(tensor)
        taken_s[name].append((comm.now() - start) / times)
    return {name: slowest(comm, times) for name, times in taken_s.items()}


def in_turn(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Yield all names in every round, the same on all ranks.

    Every round has every name, so that a disturbance of the machine meets them all alike, and in another order, as
    each finds in the caches what the one before has left there.
    """
    known, shuffled = list(names), random.Random(0)
    for _ in range(rounds):
        yield from shuffled.sample(known, len(known))


def slowest(comm: Communicator, seconds: list[float]) -> list[float]:
    """Collective. Take the largest of all ranks' figures, element by element; the same on all of them."""
    return [max(of_ranks) for of_ranks in zip(*comm.gather(seconds), strict=True)]


def calls_within(seconds: float, once_s: Mapping[str, float], most: int) -> dict[str, int]:
    """Count the calls of each side that take about `seconds` together, 1 to `most`, if one takes `once_s`."""
    return {name: between(1, seconds / (each_s or seconds), most) for name, each_s in once_s.items()}


def between(least: int, wanted: float, most: int) -> int:
    """Round `wanted` down to an integer within limits."""
    return max(least, min(most, int(wanted)))


def lower_quartile(seconds: Iterable[float]) -> float:
    """Return the lower quartile of timings: disturbances mostly add time, but the minimum is luck."""
    ascending = sorted(seconds)
    return ascending[len(ascending) // 4]


class Trial:
    """Find the fastest of several ways of doing the same while they are in use: they take turns, and are timed.

    The lower quartile of each way's times counts, on the slowest rank. So all ranks choose the same way.

    Args:
        comm: the ranks, which do the same in the same order.
        variants: their number.
        rounds: timings of each way that count.
        warm_up: timings of each way before these.
        worth: another way than the first must take less than this part of its time: the rest is noise.

    Attributes:
        variant: the number of the way to take next.
        decided: it stays so.
    """

    def __init__(self, comm: Communicator, variants: int, rounds: int, warm_up: int = 1, worth: float = 1.0):
        self._comm, self._rounds, self._warm_up, self._worth = comm, rounds, warm_up, worth
        self._taken_s = [list[float]() for _ in range(variants)]
        self.variant, self.decided = 0, False

    def record(self, seconds: float) -> None:
        """Note how long the way took. Collective at the end of the last round."""
        if self.decided:
            return
        self._taken_s[self.variant].append(seconds)
        self.variant = (self.variant + 1) % len(self._taken_s)
        if self.variant == 0 and len(self._taken_s[0]) == self._warm_up + self._rounds:
            counted = [lower_quartile(taken_s[self._warm_up :]) for taken_s in self._taken_s]
            first_s, *others_s = slowest(self._comm, counted)
            fastest_s = min(others_s)
            self.variant = 1 + others_s.index(fastest_s) if fastest_s < self._worth * first_s else 0
            self.decided = True
