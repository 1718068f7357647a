"""Which all-reduce is fastest at which length, by measurement."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveInt, model_validator
from torch import Tensor

from hpcdist.collectives.base import Algorithm, AllReduce
from hpcdist.collectives.catalogue import available, load
from hpcdist.collectives.timing import between, interleaved
from hpcdist.comm.communicator import Communicator

SIZES = tuple(1 << exponent for exponent in range(11, 27, 2))  # bytes: 2 KiB to 32 MiB, whose winner takes the rest
BUDGET_S = 0.5  # seconds of timed calls in all, beside two first calls of each
CALLS_S = 1e-3  # one timing covers as many calls as take about this long together
HOPELESS = 1.9  # an algorithm that takes longer than this many times the best one's time is not measured further
LATENCY_S, BYTE_S = 2e-6, 1e-10  # of shared memory or a fast network: where the formulas put algorithms beside others

# Choosing another algorithm than the library's own at one size, or than at the size before, must make up for this
# factor: so the choice follows what is fast over a range of sizes, and not the luck of a single measurement.
FOREIGN, SWITCHED = 1.25, 1.3


class Table(BaseModel):
    """Seconds of each algorithm at each length."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sizes: tuple[PositiveInt, ...]  # bytes, ascending
    seconds: dict[str, tuple[NonNegativeFloat | None, ...]]  # one figure per size; None: not worth it

    @model_validator(mode="after")
    def _is_complete(self) -> Table:
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"sizes of a table must ascend; got {list(self.sizes)}.")
        if any(len(row) != len(self.sizes) for row in self.seconds.values()):
            raise ValueError(f"a table must have one figure for each of its {len(self.sizes)} sizes.")
        if any(all(s is None for s in column) for column in zip(*self.seconds.values())) or not self.seconds:
            raise ValueError("a table must have a figure of at least one algorithm for each size.")
        return self

    def choice(self) -> list[str]:
        """One algorithm for each size: the sequence whose times, with what a change must make up for, are least.

        The product of the factors counts by which each size takes longer than at its best; the shortest path through
        the sizes, by dynamic programming.
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
        """Logarithm of the factor by which an algorithm is worse than the best one at a size."""
        best = min(row[size] for row in self.seconds.values() if row[size] is not None)
        own = self.seconds[name][size]
        factor = HOPELESS if own is None else own / best if best > 0 else 1.0
        return math.log(factor if name == "native" else factor * FOREIGN)

    def ranges(self) -> list[tuple[float, str]]:
        """The choice as (up to how many bytes, algorithm), ascending; the last one is without limit.

        A range ends half way between two measured sizes, geometrically.
        """
        ends = [*(math.sqrt(a * b) for a, b in zip(self.sizes, self.sizes[1:])), math.inf]
        chosen = self.choice()
        following = [*chosen[1:], None]
        return [(end, name) for end, name, after in zip(ends, chosen, following, strict=True) if name != after]


def candidates(comm: Communicator) -> list[str]:
    """The algorithms to choose from on these ranks."""
    return [name for name in available() if issubclass(load(name), Algorithm) and load(name).suits(comm)]


def measure_table(
    comm: Communicator,
    sizes: Sequence[int] = SIZES,
    algorithms: Sequence[str] | None = None,
    budget_s: float = BUDGET_S,
) -> Table:
    """Collective. Times the algorithms against each other; the same table on all ranks.

    Args:
        comm: the ranks in question. Measured on a copy of it, so that its account of traffic shows nothing of this.
        sizes: lengths in bytes, ascending, multiples of 4.
        algorithms: names; by default all that can run here.
        budget_s: seconds of timed calls in all, about.
    """
    own = comm.split(0)
    sides = {name: load(name)(own) for name in algorithms or candidates(comm)}
    seconds: dict[str, list[float | None]] = {name: [] for name in sides}
    tensor = torch.empty(max(sizes) // 4).zero_()  # written, so that its pages exist; zeros never overflow
    for size in sizes:
        part = tensor[: size // 4]
        plausible = _plausible(list(sides), size, comm)
        first = _times(own, {name: sides[name] for name in plausible}, part, rounds=2)
        # The library's own stays whatever the first calls say: what it sets up in them it does not set up again.
        limit_s = HOPELESS * min(first.values())
        hopeful = {name: sides[name] for name in plausible if name == "native" or first[name] <= limit_s}
        calls = between(1, CALLS_S / (min(first.values()) or CALLS_S), 10)
        round_s = calls * sum(first[name] for name in hopeful) or budget_s
        measured = _times(own, hopeful, part, between(7, budget_s / len(sizes) / round_s, 25), calls)
        for name, row in seconds.items():
            row.append(measured.get(name))
    for side in sides.values():
        side.close()
    own.close()
    return Table(sizes=tuple(sizes), seconds={name: tuple(row) for name, row in seconds.items()})


def _times(comm: Communicator, sides: Mapping[str, AllReduce], part: Tensor, rounds: int, calls: int = 1) -> dict:
    """Collective. Seconds per call by name: the least of the rounds, as a disturbance only adds."""
    return {name: min(times) for name, times in interleaved(comm, sides, part, rounds, calls).items()}


def _plausible(names: list[str], size: int, comm: Communicator) -> list[str]:
    """Those that by their formulas may be the fastest, and the library's own, whatever its formula says."""
    ranks_per_node = min(Counter(comm.nodes).values())
    cost_s = {n: load(n).cost_s(size, comm.size, LATENCY_S, BYTE_S, 0.0, ranks_per_node) for n in names}
    return [n for n in names if n == "native" or cost_s[n] <= HOPELESS * min(cost_s.values())]


def predict_table(comm: Communicator, latency_s: float, byte_s: float) -> Table:
    """The same by the algorithms' cost formulas, for links of that latency and that time per byte."""
    sizes = tuple(1 << exponent for exponent in range(6, 31))
    ranks_per_node = min(Counter(comm.nodes).values())
    seconds = {}
    for name in candidates(comm):
        cost_s = load(name).cost_s
        seconds[name] = tuple(cost_s(size, comm.size, latency_s, byte_s, 0.0, ranks_per_node) for size in sizes)
    return Table(sizes=sizes, seconds=seconds)
