"""The rate of each cell: the best power of 2, found from a guess by trying neighbours, on seeds of its own."""

from __future__ import annotations

from statistics import fmean

from scaling_study.cells import STRAGGLERS, Cell, Grid
from scaling_study.training import time_to, train

FIRST_SEED = 1000  # of those that rates are chosen on

Curve = list[tuple[int, float, float]]


def tune(settings: dict) -> dict:
    """For each target tries the guess and its neighbours, and goes on until the best one's neighbours have been tried.

    Best is the shortest mean time to the target or, where no rate gets there with every seed, the lowest final loss.
    """
    curves: dict[int, list[Curve]] = {}
    chosen = {}
    for target in settings["targets"]:
        around = best(curves, target) if curves else settings["guess"]
        while missing := [power for power in (around - 1, around, around + 1) if power not in curves]:
            for power in missing:
                rate, seeds = 2.0**power, range(FIRST_SEED, FIRST_SEED + settings["seeds"])
                curves[power] = [train({**settings["run"], "rate": rate, "seed": seed})["curve"] for seed in seeds]
            around = best(curves, target)
        chosen[str(target)] = around
    tried = {power: {str(t): merit(found, t) for t in settings["targets"]} for power, found in sorted(curves.items())}
    return {"best": chosen, "tried": {str(power): merits for power, merits in tried.items()}}


def merit(curves: list[Curve], target: float) -> tuple[float, float]:
    """Mean seconds to the target and mean final loss: the less the better, in this order."""
    return fmean(time_to(curve, target) for curve in curves), fmean(curve[-1][2] for curve in curves)


def best(curves: dict[int, list[Curve]], target: float) -> int:
    return min(curves, key=lambda power: merit(curves[power], target))


def settings_of(cell: Cell, grid: Grid) -> dict:
    """All that a cell's rates depend on, but for the code."""
    run = cell.settings(grid, STRAGGLERS)
    return {"run": run, "guess": cell.guess(), "targets": list(grid.targets), "seeds": grid.tuning_seeds}


def rows(cell: Cell, found: dict) -> list[dict]:
    """A row per target and rate that was tried for a cell."""
    return [
        {
            "strategy": cell.name,
            "p": cell.workers,
            "target": float(target),
            "rate": 2.0 ** int(power),
            "s to target": merits[target][0],
            "final loss": merits[target][1],
            "": "chosen" * (int(power) == chosen),
        }
        for target, chosen in found["best"].items()
        for power, merits in found["tried"].items()
    ]
