"""Time several implementations of the same operation, so that they can be compared on a noisy machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from hpcdist.comm.communicator import Communicator

Contenders = Mapping[str, Callable[[Tensor], object]]  # functions to time, by name


def interleaved(
    comm: Communicator, contenders: Contenders, tensor: Tensor, rounds: int, calls: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """Collective. Time functions in alternation; return the slowest rank's seconds per call, by function and round.

    Args:
        contenders: the functions, with the same names in the same order on all ranks.
        tensor: argument of every call.
        rounds: number of timings of each function.
        calls: number of calls that one timing of each function covers; by default one.
    """
    taken_s: dict[str, list[float]] = {name: [] for name in contenders}
    for name in in_random_order(contenders, rounds):
        function, times = contenders[name], calls[name] if calls else 1
        comm.barrier()
        start = comm.now()
        for _ in range(times):
            function(tensor)
        taken_s[name].append((comm.now() - start) / times)
    return {name: slowest(comm, times) for name, times in taken_s.items()}


def in_random_order(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Yield all names once per round, in a random order that is the same on all ranks.

    So a disturbance of the machine affects all equally, and none always finds the caches that the same other one left.
    """
    known, shuffled = list(names), random.Random(0)
    for _ in range(rounds):
        yield from shuffled.sample(known, len(known))


def slowest(comm: Communicator, seconds: list[float]) -> list[float]:
    """Collective. Return the elementwise maximum over all ranks; the same on all ranks."""
    return [max(by_rank) for by_rank in zip(*comm.gather(seconds), strict=True)]


def calls_within(seconds: float, once_s: Mapping[str, float], max_calls: int) -> dict[str, int]:
    """Return how many calls of each function take about `seconds`, 1 to `max_calls`; `once_s`: time of one call."""
    return {name: clamp(seconds / (each_s or seconds), 1, max_calls) for name, each_s in once_s.items()}


def clamp(value: float, low: int, high: int) -> int:
    """Round `value` down to an integer from `low` to `high`."""
    return max(low, min(high, int(value)))


def lower_quartile(seconds: Iterable[float]) -> float:
    """Return the lower quartile of timings: disturbances mostly add time, but the minimum is luck."""
    ascending = sorted(seconds)
    return ascending[len(ascending) // 4]


class Trial:
    """Find the fastest of several variants of a call while they are in use: they alternate, and are timed.

    Compares the lower quartile of each variant's times on the slowest rank; so all ranks choose the same variant.

    Args:
        comm: the ranks, which run the same calls in the same order.
        variants: number of variants.
        rounds: timings of each variant that count.
        warm_up: timings of each variant before these.
        worth: a variant replaces the first only if it takes less than this fraction of its time; the rest is noise.

    Attributes:
        variant: index of the variant to use for the next call.
        decided: the choice is final.
    """

    def __init__(self, comm: Communicator, variants: int, rounds: int, warm_up: int = 1, worth: float = 1.0):
        self._comm, self._rounds, self._warm_up, self._worth = comm, rounds, warm_up, worth
        self._taken_s = [list[float]() for _ in range(variants)]
        self.variant, self.decided = 0, False

    def record(self, seconds: float) -> None:
        """Record the seconds of the variant just used. Collective at the end of the last round."""
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
