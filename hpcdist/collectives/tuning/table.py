"""Measure all-reduce algorithms, cache the table of times, and choose the fastest algorithm for each length."""

from __future__ import annotations

import itertools
import math
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import cast

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveInt, model_validator
from torch import Tensor

from hpcdist.collectives import available, load
from hpcdist.collectives.base import Algorithm, AllReduce
from hpcdist.collectives.tuning.timing import calls_within, clamp, interleaved, lower_quartile
from hpcdist.comm.cache import cache_file, load_or_measure
from hpcdist.comm.communicator import Communicator

# Bytes: 4 KiB to 16 MiB, and one size that exceeds all caches, whose winner is used for all longer tensors.
SIZES = (*(1 << exponent for exponent in range(12, 25)), 1 << 26)
LONG = 1 << 25  # from this size on only algorithms that were fast at the previous size are timed, and only once
SLOW_S = 0.1  # if the fastest call takes longer, no larger size is measured: a slow network would take minutes
BUDGET_S = 0.6  # total seconds of timed calls, without the first calls
CALLS_S, MAX_CALLS = 1e-3, 50  # one timing covers as many calls as take about this long
FIRST_CALLS = 8  # maximum number of untimed calls: an algorithm may prepare its calls
ROUNDS = 6  # maximum timings of an algorithm per size in one pass through the sizes

# After each pass a size drops the algorithms that took longer than this multiple of the fastest one's time. The first
# pass is untimed: it touches memory for the first time.
LIMITS = (3.0, 1.9, 1.6, 1.4, 1.3, 1.3)
HOPELESS = 1.9  # factor assumed for an algorithm without a timing
LATENCY_S, BYTE_S = 2e-6, 1e-10  # of shared memory or a fast network, to compare the cost formulas
PLAUSIBLE = 5.0  # an algorithm whose predicted cost is more than this multiple of the smallest is not measured at all

# An algorithm other than the library's, or than that of the previous size, must be faster by these factors to be
# chosen: so the choice follows a range of sizes instead of the noise of a single measurement.
FOREIGN, SWITCHED = 1.15, 1.2
LAST = 3  # weight of the last size, which represents all longer tensors


class TimingTable(BaseModel):
    """The measured seconds of each algorithm at each size."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sizes: tuple[PositiveInt, ...]  # bytes, ascending
    seconds: dict[str, tuple[NonNegativeFloat | None, ...]]  # by algorithm, one value per size; None: not measured

    @model_validator(mode="after")
    def _is_complete(self) -> TimingTable:
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes of a table must ascend; got {list(self.sizes)}.")
        if any(len(row) != len(self.sizes) for row in self.seconds.values()):
            raise ValueError(f"a table must have one figure for each of its {len(self.sizes)} sizes.")
        if any(all(s is None for s in column) for column in zip(*self.seconds.values())) or not self.seconds:
            raise ValueError("a table must have a figure of at least one algorithm for each size.")
        return self

    def choice(self) -> list[str]:
        """Choose one algorithm for each size, minimizing the total slowdown; each change of the algorithm costs, too.

        The cost of a sequence is the product of each size's slowdown over its fastest algorithm; dynamic programming
        finds the cheapest sequence. An algorithm is never chosen where the library's was faster.
        """
        # By the last algorithm, the cheapest sequence so far: the logarithm of its cost, and its algorithms.
        paths: dict[str, tuple[float, list[str]]] = {name: (0.0, []) for name in self.seconds}
        for size in range(len(self.sizes)):
            cost, names = min(paths.values(), key=lambda path: path[0])
            changed = (cost + math.log(SWITCHED) * bool(names), names)
            paths = {
                name: (prefix[0] + self._excess(name, size), [*prefix[1], name])
                for name, path in paths.items()
                for prefix in [min(path, changed, key=lambda path: path[0])]
            }
        return min(paths.values(), key=lambda path: path[0])[1]

    def _excess(self, name: str, size: int) -> float:
        """Return the weighted logarithm of an algorithm's slowdown over the fastest at `size`, an index of `sizes`."""
        best_s = min(each_s for row in self.seconds.values() if (each_s := row[size]) is not None)
        native_s = self.seconds["native"][size] if "native" in self.seconds else None
        taken_s = self.seconds[name][size]
        if name != "native" and native_s is not None and (taken_s is None or taken_s > native_s):
            return math.inf
        factor = HOPELESS if taken_s is None else taken_s / best_s if best_s > 0 else 1.0
        weight = LAST if size == len(self.sizes) - 1 else 1
        return weight * math.log(factor if name == "native" else factor * FOREIGN)

    def ranges(self) -> list[tuple[float, str]]:
        """Return the choice as (largest number of bytes, algorithm) pairs, ascending; the last limit is infinite.

        A range ends at the geometric mean of two measured sizes.
        """
        return _joined(self.sizes, self.choice())


def candidates(comm: Communicator) -> list[str]:
    """List the algorithms to choose from on these ranks."""
    classes = {name: load(name) for name in available()}
    return [name for name, cls in classes.items() if issubclass(cls, Algorithm) and cls.suits(comm)]


def measure_table(
    comm: Communicator, sizes: Sequence[int] = SIZES, algorithms: Sequence[str] | None = None,
    budget_s: float = BUDGET_S,
) -> TimingTable:  # fmt: skip
    """Collective. Time the algorithms against each other; the same table on all ranks.

    Args:
        comm: the ranks. A copy of it is measured, so its traffic counters do not change.
        sizes: lengths in bytes, ascending, multiples of 4. The table ends with the first one that takes SLOW_S or more.
        algorithms: names; by default all that can run here.
        budget_s: approximate total seconds of timed calls.
    """
    copy = comm.split(0)
    contenders = {name: load(name)(copy) for name in algorithms or candidates(comm)}
    tensor = torch.empty(max(sizes) // 4).zero_()  # written, so that its pages exist; zeros never overflow
    races: list[_Race] = []

    def add(size: int, names: Sequence[str], limit: float) -> None:
        if not races or races[-1].fastest_s < SLOW_S:
            races.append(_Race(copy, {name: contenders[name] for name in names}, tensor[: size // 4]))
            races[-1].warm_up(limit)

    first, *further = LIMITS
    for size in sizes:
        if size < LONG:
            add(size, list(contenders), first)
    share_s = budget_s / len(sizes) / len(further)
    for limit in further:
        for race in races:  # pass by pass: a disturbance then affects all sizes, and only part of each one's timings
            race.run(share_s, limit)
    for size in sizes:
        if size >= LONG:
            add(size, _near(races[-1].timings_s(), HOPELESS) if races else list(contenders), HOPELESS)
    for contender in contenders.values():
        contender.close()
    copy.close()
    timings = [race.timings_s() for race in races]
    seconds = {name: tuple(of_size.get(name) for of_size in timings) for name in contenders}
    return TimingTable(sizes=tuple(sizes[: len(races)]), seconds=seconds)


class _Race:
    """Times the algorithms that may be the fastest for one tensor. Its methods are collective."""

    def __init__(self, comm: Communicator, contenders: Mapping[str, AllReduce], tensor: Tensor):
        self._comm, self._tensor = comm, tensor
        ranks_per_node = min(Counter(comm.nodes).values())
        cost_s = _predicted_s(list(contenders), tensor.nbytes, comm.size, LATENCY_S, BYTE_S, ranks_per_node)
        self._racing = {name: contenders[name] for name in _near(cost_s, PLAUSIBLE)}
        self._warm_up_s: dict[str, float] = {}
        self._taken_s: dict[str, list[float]] = {}

    def warm_up(self, limit: float) -> None:
        """Run the first, untimed calls, and drop slow algorithms."""
        first = interleaved(self._comm, self._racing, self._tensor, 1)
        calls = calls_within(CALLS_S, {name: taken_s for name, (taken_s,) in first.items()}, FIRST_CALLS)
        again = interleaved(self._comm, self._racing, self._tensor, 1, calls)
        self._warm_up_s = {name: min(first[name] + again[name]) for name in self._racing}
        self._drop(self._warm_up_s, limit)

    @property
    def fastest_s(self) -> float:
        """Return the seconds of the fastest call of the warm-up; the same on all ranks."""
        return min(self._warm_up_s.values())

    def run(self, budget_s: float, limit: float) -> None:
        """Time the algorithms for about `budget_s`, and drop those that take over `limit` times the fastest's time."""
        if len(self._racing) > 1:
            once_s = {name: self._warm_up_s[name] for name in self._racing}
            calls = calls_within(CALLS_S, once_s, MAX_CALLS)
            round_s = sum(calls[name] * once_s[name] for name in once_s) or budget_s
            rounds = clamp(budget_s / round_s, 1, ROUNDS)
            for name, times in interleaved(self._comm, self._racing, self._tensor, rounds, calls).items():
                self._taken_s.setdefault(name, []).extend(times)
            self._drop(self.timings_s(), limit)

    def _drop(self, seconds: Mapping[str, float], limit: float) -> None:
        near = _near({name: seconds[name] for name in self._racing}, limit)
        self._racing = {name: self._racing[name] for name in near}

    def timings_s(self) -> dict[str, float]:
        """Return the lower quartile of each algorithm's timings; before any, the seconds of the untimed calls."""
        timings_s = {name: lower_quartile(times) for name, times in self._taken_s.items()}
        return timings_s or {name: self._warm_up_s[name] for name in self._racing}


def _near(seconds: Mapping[str, float], factor: float) -> list[str]:
    """Return the algorithms that take at most `factor` times the minimum, and always `native`, the reference."""
    limit_s = factor * min(seconds.values())
    return [name for name, each_s in seconds.items() if name == "native" or each_s <= limit_s]


def _predicted_s(
    names: Sequence[str], n_bytes: float, size: int, latency_s: float, byte_s: float, ranks_per_node: int
) -> dict[str, float]:
    formulas = {name: cast(type[Algorithm], load(name)).cost_s for name in names}
    return {name: cost_s(n_bytes, size, latency_s, byte_s, 0.0, ranks_per_node) for name, cost_s in formulas.items()}


def predicted_ranges(comm: Communicator, latency_s: float, byte_s: float) -> list[tuple[float, str]]:
    """Return the ranges, as `TimingTable.ranges`, of the cheapest algorithm by the cost formulas.

    The formulas have no noise, so the library's all-reduce is preferred only among equals. `latency_s` and `byte_s`
    are those of the links between the ranks: the latency, and the seconds per byte.
    """
    names = sorted(candidates(comm), key=lambda name: name != "native")
    return list(_predicted(tuple(names), comm.size, latency_s, byte_s, min(Counter(comm.nodes).values())))


@lru_cache
def _predicted(
    names: tuple[str, ...], size: int, latency_s: float, byte_s: float, ranks_per_node: int
) -> list[tuple[float, str]]:
    """Return the ranges of `predicted_ranges`; cached, as all virtual ranks ask for the same."""
    sizes = [2 ** (quarter / 4) for quarter in range(4 * 6, 4 * 30)]  # bytes, 64 B to 1 GiB
    costs_s = [_predicted_s(names, n_bytes, size, latency_s, byte_s, ranks_per_node) for n_bytes in sizes]
    return _joined(sizes, [min(each_s, key=each_s.__getitem__) for each_s in costs_s])


def _joined(sizes: Sequence[float], chosen: Sequence[str]) -> list[tuple[float, str]]:
    """Merge consecutive sizes with the same choice into ranges, which end at the geometric mean of two sizes."""
    ends = [*(math.sqrt(a * b) for a, b in itertools.pairwise(sizes)), math.inf]
    following = [*chosen[1:], None]
    return [(end, name) for end, name, after in zip(ends, chosen, following, strict=True) if name != after]


def cached_table(comm: Communicator, cache_dir: Path | None = None, *, refresh: bool = False) -> TimingTable:
    """Collective. Return the cached table of this machine, or measure and cache it; the same on all ranks.

    Warns, and measures again, if the file is invalid; warns if it can't be written.

    Args:
        cache_dir: folder of the file, created if missing; `~` is the user's home; None: the user's cache folder.
        refresh: measure even if there is a file, and replace it.
    """
    hosts = len(set(comm.gather(platform.node())))  # fewer than nodes if ranks of one host are treated as several nodes
    nodes = sorted(Counter(comm.nodes).values())
    path = cache_file("allreduce", nodes, hosts, comm.platform.library, folder=cache_dir)
    names = candidates(comm)

    def check(text: str) -> str:
        table = TimingTable.model_validate_json(text)
        return text if sorted(table.seconds) == sorted(names) else ""  # out of date: other algorithms can run now

    def measure() -> str:
        return measure_table(comm, algorithms=names).model_dump_json(indent=1)

    text = load_or_measure(comm, path, check, measure, "table of all-reduce times", refresh=refresh)
    return TimingTable.model_validate_json(text)
