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
