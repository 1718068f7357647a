"""Timing several ways of doing the same, so that they can be compared on a noisy machine."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping

from torch import Tensor

from hpcdist.comm.communicator import Communicator


def interleaved(
    comm: Communicator, sides: Mapping[str, Callable[[Tensor], object]], tensor: Tensor, rounds: int, calls: int = 1
) -> dict[str, list[float]]:
    """Collective. Seconds per call of each side, round by round, each of the rank that took longest.

    Every round runs every side, so that a disturbance of the machine meets them all alike, and in another order, as
    each finds in the caches what the one before has left there.

    Args:
        sides: what to time, by name; the same names in the same order on all ranks.
        tensor: handed to every call.
        rounds: how often each side is timed.
        calls: how many calls one timing covers.
    """
    taken_s: dict[str, list[float]] = {name: [] for name in sides}
    shuffled = random.Random(0)  # the same order on all ranks
    for _ in range(rounds):
        for name in shuffled.sample(list(sides), len(sides)):
            comm.barrier()
            start = comm.now()
            for _ in range(calls):
                sides[name](tensor)
            taken_s[name].append((comm.now() - start) / calls)
    return {name: slowest(comm, times) for name, times in taken_s.items()}


def slowest(comm: Communicator, seconds: list[float]) -> list[float]:
    """Collective. Element by element the largest of all ranks' figures, the same on all of them."""
    layout = f"{len(seconds)}d"
    told = [struct.unpack(layout, data) for data in comm.exchange(struct.pack(layout, *seconds))]
    return [max(column) for column in zip(*told, strict=True)]


def between(least: int, wanted: float, most: int) -> int:
    """`wanted` as a whole number within limits."""
    return max(least, min(most, int(wanted)))
