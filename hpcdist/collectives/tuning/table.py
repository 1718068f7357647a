"""The table of measured all-reduce times, its file, and the choice of the fastest algorithm at each length."""

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
from hpcdist.collectives.tuning.timing import between, calls_within, interleaved, lower_quartile
from hpcdist.comm.cache import cache_file, measured
from hpcdist.comm.communicator import Communicator

# Bytes: 4 KiB to 16 MiB, and one length that no cache holds, whose winner takes the rest.
SIZES = (*(1 << exponent for exponent in range(12, 25)), 1 << 26)
LONG = 1 << 25  # from here on only what did well at the size before is timed, and only once
SLOW_S = 0.1  # of the fastest one's call: nothing longer is measured, which a slow network would take minutes for
BUDGET_S = 0.6  # seconds of timed calls in all, beside the first ones
CALLS_S, MOST_CALLS = 1e-3, 50  # one timing covers as many calls as take about this long together
FIRST_CALLS = 8  # at most so many come before those that count: an algorithm may prepare them
ROUNDS = 6  # timings of an algorithm at a size in one pass through the sizes, at most

# After each pass those are dropped from a size that took longer than so many times the best one's time: in the first
# one, which is not counted, memory is touched for the first time.
LIMITS = (3.0, 1.9, 1.6, 1.4, 1.3, 1.3)
HOPELESS = 1.9  # what having no figure counts as
LATENCY_S, BYTE_S = 2e-6, 1e-10  # of shared memory or a fast network: where the formulas put algorithms beside others
PLAUSIBLE = 5.0  # an algorithm whose formula gives more than this many times the least is not measured at all

# Choosing another algorithm than the library's own at one size, or than at the size before, must make up for this
# factor: so the choice follows what is fast over a range of sizes, and not the luck of a single measurement.
FOREIGN, SWITCHED = 1.15, 1.2
LAST = 3  # so many sizes does the last one count for, as it stands for all that are longer


class TimingTable(BaseModel):
    """The seconds of each algorithm at each length."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sizes: tuple[PositiveInt, ...]  # bytes, ascending
    seconds: dict[str, tuple[NonNegativeFloat | None, ...]]  # one figure per size; None: not worth it

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
        """Choose one algorithm for each size: the sequence of least cost, where each change costs a factor too.

        The cost is the product of the factors by which each size takes longer than its fastest algorithm; the
        shortest path through the sizes is found by dynamic programming. Where the library's own was faster than
        another algorithm, that one is not chosen.
        """
        paths: dict[str, tuple[float, list[str]]] = {name: (0.0, []) for name in self.seconds}
        for size in range(len(self.sizes)):
            cost, way = min(paths.values(), key=lambda path: path[0])
            changed = (cost + math.log(SWITCHED) * bool(way), way)
            paths = {
                name: (before[0] + self._excess(name, size), [*before[1], name])
                for name, path in paths.items()
                for before in [min(path, changed, key=lambda path: path[0])]
            }
        return min(paths.values(), key=lambda path: path[0])[1]

    def _excess(self, name: str, size: int) -> float:
        """Compute the logarithm of the factor by which an algorithm is slower than the best at a size, weighted."""
        best = min(each_s for row in self.seconds.values() if (each_s := row[size]) is not None)
        library = self.seconds["native"][size] if "native" in self.seconds else None
        own = self.seconds[name][size]
        if name != "native" and library is not None and (own is None or own > library):
            return math.inf
        factor = HOPELESS if own is None else own / best if best > 0 else 1.0
        weight = LAST if size == len(self.sizes) - 1 else 1
        return weight * math.log(factor if name == "native" else factor * FOREIGN)

    def ranges(self) -> list[tuple[float, str]]:
        """List the choice as (largest number of bytes, algorithm), ascending; the last one is without limit.

        A range ends at the geometric mean of two measured sizes.
        """
        return _joined(self.sizes, self.choice())


def candidates(comm: Communicator) -> list[str]:
    """List the algorithms to choose from on these ranks."""
    found = {name: load(name) for name in available()}
    return [name for name, cls in found.items() if issubclass(cls, Algorithm) and cls.suits(comm)]


def measure_table(
    comm: Communicator,
    sizes: Sequence[int] = SIZES,
    algorithms: Sequence[str] | None = None,
    budget_s: float = BUDGET_S,
) -> TimingTable:
    """Collective. Time the algorithms against each other; the same table on all ranks.

    Args:
        comm: the ranks in question. Measured on a copy of it, so that its account of traffic shows nothing of this.
        sizes: lengths in bytes, ascending, multiples of 4. The table ends with the first that takes SLOW_S or more.
        algorithms: names; by default all that can run here.
        budget_s: seconds of timed calls in all, about.
    """
    own = comm.split(0)
    sides = {name: load(name)(own) for name in algorithms or candidates(comm)}
    tensor = torch.empty(max(sizes) // 4).zero_()  # written, so that its pages exist; zeros never overflow
    races: list[_Race] = []

    def add(size: int, names: Sequence[str], limit: float) -> None:
        if not races or races[-1].least_s < SLOW_S:
            races.append(_Race(own, {name: sides[name] for name in names}, tensor[: size // 4]))
            races[-1].warm_up(limit)

    first, *further = LIMITS
    for size in sizes:
        if size < LONG:
            add(size, list(sides), first)
    share_s = budget_s / len(sizes) / len(further)
    for limit in further:
        for race in races:  # a disturbance that lasts falls on all sizes, and on a part of each one's timings
            race.run(share_s, limit)
    for size in sizes:
        if size >= LONG:
            add(size, _near(races[-1].figures_s(), HOPELESS) if races else list(sides), HOPELESS)
    for side in sides.values():
        side.close()
    own.close()
    figures = [race.figures_s() for race in races]
    seconds = {name: tuple(of_size.get(name) for of_size in figures) for name in sides}
    return TimingTable(sizes=tuple(sizes[: len(races)]), seconds=seconds)


class _Race:
    """The algorithms that may be the fastest for one tensor. Its methods are Collective."""

    def __init__(self, comm: Communicator, sides: Mapping[str, AllReduce], tensor: Tensor):
        self._comm, self._tensor = comm, tensor
        cost_s = _costs_s(comm, list(sides), tensor.nbytes, LATENCY_S, BYTE_S)
        self._racing = {name: sides[name] for name in _near(cost_s, PLAUSIBLE)}
        self._once_s: dict[str, float] = {}
        self._taken_s: dict[str, list[float]] = {}

    def warm_up(self, limit: float) -> None:
        first = interleaved(self._comm, self._racing, self._tensor, 1)
        calls = calls_within(CALLS_S, {name: taken_s for name, (taken_s,) in first.items()}, FIRST_CALLS)
        again = interleaved(self._comm, self._racing, self._tensor, 1, calls)
        self._once_s = {name: min(first[name] + again[name]) for name in self._racing}
        self._drop(self._once_s, limit)

    @property
    def least_s(self) -> float:
        """Return the seconds of the fastest one's first calls; the same on all ranks."""
        return min(self._once_s.values())

    def run(self, budget_s: float, limit: float) -> None:
        """Time the algorithms a few more times, and drop those beyond the limit."""
        if len(self._racing) > 1:
            once_s = {name: self._once_s[name] for name in self._racing}
            calls = calls_within(CALLS_S, once_s, MOST_CALLS)
            round_s = sum(calls[name] * once_s[name] for name in once_s) or budget_s
            rounds = between(1, budget_s / round_s, ROUNDS)
            for name, times in interleaved(self._comm, self._racing, self._tensor, rounds, calls).items():
                self._taken_s.setdefault(name, []).extend(times)
            self._drop(self.figures_s(), limit)

    def _drop(self, seconds: Mapping[str, float], limit: float) -> None:
        near = _near({name: seconds[name] for name in self._racing}, limit)
        self._racing = {name: self._racing[name] for name in near}

    def figures_s(self) -> dict[str, float]:
        """Return the lower quartile of each one's timings."""
        figures_s = {name: lower_quartile(times) for name, times in self._taken_s.items()}
        return figures_s or {name: self._once_s[name] for name in self._racing}


def _near(seconds: Mapping[str, float], factor: float) -> list[str]:
    """List those that take at most `factor` times the least, and the library's own, the reference of all."""
    limit_s = factor * min(seconds.values())
    return [name for name, each_s in seconds.items() if name == "native" or each_s <= limit_s]


def _costs_s(
    comm: Communicator, names: Sequence[str], n_bytes: float, latency_s: float, byte_s: float
) -> dict[str, float]:
    """Predict the seconds of a call of each algorithm by its formula."""
    return _predicted_s(tuple(names), n_bytes, comm.size, latency_s, byte_s, min(Counter(comm.nodes).values()))


def _predicted_s(
    names: Sequence[str], n_bytes: float, size: int, latency_s: float, byte_s: float, ranks_per_node: int
) -> dict[str, float]:
    formulas = {name: cast(type[Algorithm], load(name)).cost_s for name in names}
    return {name: cost_s(n_bytes, size, latency_s, byte_s, 0.0, ranks_per_node) for name, cost_s in formulas.items()}


def predicted_ranges(comm: Communicator, latency_s: float, byte_s: float) -> list[tuple[float, str]]:
    """List the algorithm of least cost by its formula at each length, as `TimingTable.ranges` does.

    The formulas are exact, so no algorithm is preferred but the library's own among equals.

    Args:
        latency_s, byte_s: of the links between the ranks.
    """
    names = sorted(candidates(comm), key=lambda name: name != "native")
    return list(_predicted(tuple(names), comm.size, latency_s, byte_s, min(Counter(comm.nodes).values())))


@lru_cache
def _predicted(
    names: tuple[str, ...], size: int, latency_s: float, byte_s: float, ranks_per_node: int
) -> list[tuple[float, str]]:
    """List the ranges once for all virtual ranks, which ask for the same."""
    sizes = [2 ** (quarter / 4) for quarter in range(4 * 6, 4 * 30)]
    costs_s = [_predicted_s(names, n_bytes, size, latency_s, byte_s, ranks_per_node) for n_bytes in sizes]
    return _joined(sizes, [min(each_s, key=each_s.__getitem__) for each_s in costs_s])


def _joined(sizes: Sequence[float], chosen: Sequence[str]) -> list[tuple[float, str]]:
    """Join neighbours of one choice to ranges, which end at the geometric mean of two sizes."""
    ends = [*(math.sqrt(a * b) for a, b in itertools.pairwise(sizes)), math.inf]
    following = [*chosen[1:], None]
    return [(end, name) for end, name, after in zip(ends, chosen, following, strict=True) if name != after]


def cached_table(comm: Communicator, cache_dir: Path | None = None, *, refresh: bool = False) -> TimingTable:
    """Collective. Read the table of this machine from its file, or measure it and write it there.

    Rank 0 alone reads and writes; all ranks get the same table. A file that can't be used is measured anew, with a
    warning; one that can't be written too.

    Args:
        cache_dir: where the file lies; `~` is the user's home; None: the user's cache. Made where it is missing.
        refresh: measure although there is a file, and replace it.
    """
    hosts = len(set(comm.gather(platform.node())))  # fewer than nodes where ranks of one host are taken to be apart
    nodes = sorted(Counter(comm.nodes).values())
    path = cache_file("allreduce", nodes, hosts, comm.platform.library, folder=cache_dir)
    names = candidates(comm)

    def check(text: str) -> str:
        table = TimingTable.model_validate_json(text)
        return text if sorted(table.seconds) == sorted(names) else ""  # other algorithms can run now: out of date

    def measure() -> str:
        return measure_table(comm, algorithms=names).model_dump_json(indent=1)

    text = measured(comm, path, check, measure, "table of all-reduce times", refresh=refresh)
    return TimingTable.model_validate_json(text)
