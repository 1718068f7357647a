"""Timing several ways of doing the same, so that they can be compared on a noisy machine."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from statistics import median

from torch import Tensor

from hpcdist.comm.communicator import Communicator


def interleaved(
    comm: Communicator,
    sides: Mapping[str, Callable[[Tensor], None]],
    tensor: Tensor,
    rounds: int,
    calls: int = 1,
) -> dict[str, float]:
    """Collective. Seconds per call of each side: the median over the rounds, of the slowest rank.

    Every round runs every side, so that a disturbance of the machine meets them all alike.

    Args:
        sides: what to time, by name; the same names in the same order on all ranks.
        tensor: handed to every call.
        rounds: how often each side is timed.
        calls: how many calls one timing covers.
    """
    taken_s: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            comm.barrier()
            start = comm.now()
            for _ in range(calls):
                side(tensor)
            taken_s[name].append((comm.now() - start) / calls)
    return dict(zip(sides, slowest(comm, [median(times) for times in taken_s.values()]), strict=True))


def slowest(comm: Communicator, seconds: list[float]) -> list[float]:
    """Collective. Element by element the largest of all ranks' figures, the same on all of them."""
    layout = f"{len(seconds)}d"
    return [max(column) for column in zip(*(struct.unpack(layout, told) for told in comm.exchange(struct.pack(layout, *seconds))))]
