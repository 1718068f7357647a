"""Timing several ways of doing the same, so that they can be compared on a noisy machine."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping

from torch import Tensor

from hpcdist.comm.communicator import Communicator


def interleaved(
    comm: Communicator,
    sides: Mapping[str, Callable[[Tensor], object]],
    tensor: Tensor,
    rounds: int,
    calls: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Collective. Seconds per call of each side, round by round, each of the rank that took longest.

    Every round runs every side, so that a disturbance of the machine meets them all alike, and in another order, as
    each finds in the caches what the one before has left there.

    Args:
        sides: what to time, by name; the same names in the same order on all ranks.
        tensor: handed to every call.
        rounds: how often each side is timed.
        calls: how many calls one timing of a side covers; by default one.
    """
    taken_s: dict[str, list[float]] = {name: [] for name in sides}
    shuffled = random.Random(0)  # the same order on all ranks
    for _ in range(rounds):
        for name in shuffled.sample(list(sides), len(sides)):
            side, times = sides[name], calls[name] if calls else 1
            comm.barrier()
            start = comm.now()
            for _ in range(times):
                side(tensor)
            taken_s[name].append((comm.now() - start) / times)
    return {name: slowest(comm, times) for name, times in taken_s.items()}


def slowest(comm: Communicator, seconds: list[float]) -> list[float]:
    """Collective. Element by element the largest of all ranks' figures, the same on all of them."""
    layout = f"{len(seconds)}d"
    told = [struct.unpack(layout, data) for data in comm.exchange(struct.pack(layout, *seconds))]
    return [max(column) for column in zip(*told, strict=True)]


def calls_within(seconds: float, once_s: Mapping[str, float], most: int) -> dict[str, int]:
    """How many calls of each side take about `seconds` together, 1 to `most`, if one takes `once_s`."""
    return {name: between(1, seconds / (each_s or seconds), most) for name, each_s in once_s.items()}


def between(least: int, wanted: float, most: int) -> int:
    """`wanted` as a whole number within limits."""
    return max(least, min(most, int(wanted)))
