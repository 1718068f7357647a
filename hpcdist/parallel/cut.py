"""Cuts of a model into stages, runs of consecutive layers: by their costs, or by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from hpcdist.errors import ConfigError
from hpcdist.parallel.layers import Chain

Weight = Callable[[int, int, int], Any]  # (stage, first layer, last layer + 1) -> cost of the stage; None forbids it


@dataclass(frozen=True)
class Cut:
    """Stages of a model: stage s has the layers bounds[s] to bounds[s + 1] - 1."""

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.bounds) < 2 or self.bounds[0] != 0 or any(a >= b for a, b in pairwise(self.bounds)):
            raise ConfigError(f"bounds of stages must ascend from 0; got {self.bounds}. Give each stage a layer.")

    def __str__(self) -> str:
        return ",".join(map(str, self.sizes))

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in pairwise(self.bounds))

    def layers(self, stage: int) -> range:
        return range(self.bounds[stage], self.bounds[stage + 1])


def by_hand(sizes: Sequence[int], n_layers: int) -> Cut:
    """Return the cut into stages of `sizes` layers, each above 0; raise ConfigError if they don't sum to `n_layers`."""
    if not sizes or min(sizes) < 1 or sum(sizes) != n_layers:
        raise ConfigError(
            f"cut must be numbers of layers, at least 1 for each stage, whose sum is the model's {n_layers}; got "
            f"{', '.join(map(str, sizes)) or 'none'}. Change them, or leave the cut out to have it computed."
        )
    return Cut((0, *accumulate(sizes)))


def cut_of(whole: Chain, parts: int, cut: Cut | Sequence[int] | None) -> Cut:
    """Return the cut of a model into `parts` stages: `cut`, checked, or if that is None, one balanced by parameters."""
    if isinstance(cut, Cut):
        if cut.stages != parts or cut.bounds[-1] != len(whole):
            raise ConfigError(
                f"cut must be of {len(whole)} layers into {parts} stages, one per rank and chunk; got one of "
                f"{cut.bounds[-1]} layers into {cut.stages}."
            )
        return cut
    if cut is not None:
        return cut_of(whole, parts, by_hand(cut, len(whole)))
    # Layers without parameters cost nothing, so that none is a stage by itself if there are enough others.
    costs = [sum(p.numel() for p in whole.layer(number).parameters()) for number in range(len(whole))]
    return balance(costs, parts)


def balance(
    costs: Sequence[float],
    stages: int,
    memory: Sequence[int] | Callable[[int, range], int] | None = None,
    limit_bytes: int | None = None,
    boundaries: Sequence[int] | None = None,
    needed: Sequence[bool] | None = None,
) -> Cut:
    """Cut a model so that the slowest stage is as fast as possible, by dynamic programming.

    Among such cuts take the one that sends the fewest bytes, and among these the most even one.

    Args:
        costs: the time of each layer, in any unit.
        stages: the number of stages.
        memory: the bytes of each layer; or a function (stage, layers) -> bytes, as stages keep the activations of
            different numbers of micro-batches.
        limit_bytes: the largest memory of a stage.
        boundaries: the bytes that go from each layer to the next.
        needed: True for layers of which each stage needs at least one, such as layers with parameters.

    Raises:
        ConfigError: there are more stages than layers, or than needed layers; or no cut keeps the limit.
    """
    layers = len(costs)
    needed = [True] * layers if needed is None else needed
    if not 1 <= stages <= sum(needed):
        raise ConfigError(
            f"stages must be 1 to the model's number of layers{'' if all(needed) else ' with parameters'}, "
            f"{sum(needed)}; got {stages}. Take fewer stages or chunks, or cut the model into more layers."
        )
    if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        raise ConfigError(f"costs of layers must be finite and at least 0; got {list(costs)}. Measure them again.")
    # Functions of a part: (stage, first layer, last layer + 1).
    time, n_needed = _sum(costs), _sum(needed)
    if callable(memory):
        sizes: Weight = lambda stage, first, end: memory(stage, range(first, end))  # noqa: E731
    else:
        sizes = _sum(memory or [0] * layers)
    limit = math.inf if limit_bytes is None else limit_bytes
    _need_room(sizes, n_needed, layers, stages, limit)

    def fits(*part: int) -> bool:
        return n_needed(*part) > 0 and sizes(*part) <= limit

    slowest, _ = _best(lambda *part: time(*part) if fits(*part) else None, max, layers, stages)
    sent = [0, *(boundaries or [0] * layers)]

    def price(*part: int) -> tuple[float, float] | None:
        return (sent[part[1]], time(*part) ** 2) if time(*part) <= slowest and fits(*part) else None

    return Cut(_best(price, lambda a, b: (a[0] + b[0], a[1] + b[1]), layers, stages)[1])


def _sum(weights: Sequence[float]) -> Weight:
    """Return a function for the cost of a stage, the sum of its layers' weights."""
    totals = [0, *accumulate(weights)]
    return lambda stage, first, end: totals[end] - totals[first]


def _best(weight: Weight, combine: Callable[[Any, Any], Any], layers: int, stages: int) -> tuple[Any, tuple[int, ...]]:
    """Return the smallest combined weight of a cut's stages, and its bounds, by recursion over (stage, layers so far).

    `combine` must not decrease in either argument.
    """
    best: dict[int, tuple[Any, tuple[int, ...]]] = {
        end: (cost, (0, end)) for end in range(1, layers - stages + 2) if (cost := weight(0, 0, end)) is not None
    }
    for stage in range(1, stages):
        previous, best = best, {}
        for end in range(stage + 1, layers - stages + stage + 2):
            tries = [
                (combine(total, cost), (*bounds, end))
                for first, (total, bounds) in previous.items()
                if first < end and (cost := weight(stage, first, end)) is not None
            ]
            if tries:
                best[end] = min(tries)
    return best[layers]


def _need_room(sizes: Weight, useful: Weight, layers: int, stages: int, limit_bytes: float) -> None:
    """Raise ConfigError if no cut keeps the limit, with the layer, or the stage of the best cut, that exceeds it."""
    for layer in range(layers):
        smallest = min(sizes(stage, layer, layer + 1) for stage in range(stages))
        if smallest > limit_bytes:
            raise ConfigError(
                f"memory of each stage must be at most {limit_bytes} bytes; got {smallest} of layer {layer} alone. "
                "Raise the limit, or divide this layer."
            )
    smallest, bounds = _best(lambda *part: sizes(*part) if useful(*part) else None, max, layers, stages)
    if smallest > limit_bytes:
        stage = next(s for s in range(stages) if sizes(s, bounds[s], bounds[s + 1]) == smallest)
        raise ConfigError(
            f"memory of each stage must be at most {limit_bytes} bytes; got {smallest} of stage {stage} (layers "
            f"{bounds[stage]} to {bounds[stage + 1] - 1}) in the cut that needs the least. Take more stages, smaller "
            "micro-batches or recomputation, or raise the limit."
        )
