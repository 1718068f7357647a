"""The space of a sweep: settings, and the values that each may have."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpcdist.errors import ConfigError
from hpcdist.tools.compare.experiment import Sweep

FORMS = "KEY=A,B,C or KEY=LOW..HIGH[:log][:POINTS]"
_NUMBER = r"[+-]?\d+\.?\d*(?:e[+-]?\d+)?|[+-]?\.\d+(?:e[+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(:log)?(?::(\d+))?", re.IGNORECASE)


@dataclass(frozen=True)
class Axis:
    """The values of one setting: those listed, or all between two.

    Attributes:
        values: as `--set` takes them; empty for a range.
        log: equal ratios count alike.
        whole: whole numbers only.
    """

    key: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    def has(self, text: str) -> bool:
        """Tell whether a trial may have this value, as `text` writes it."""
        return text in self.values if self.values else math.isfinite(self.place(text))

    def place(self, text: str) -> float:
        """Place a value between 0 and 1, in the order listed or in the range; NaN in a range without two ends."""
        if self.values:
            return self.values.index(text) / max(1, len(self.values) - 1)
        value, low, high = (math.log(float(one)) if self.log else float(one) for one in (text, self.low, self.high))
        return (value - low) / (high - low) if low < high else math.nan

    def text(self, value: object) -> str:
        """Write a value as `--set` takes it."""
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the values listed, or both ends of the range."""
        ends = (int(self.low), int(self.high)) if self.whole else (self.low, self.high)
        return self.values or tuple(map(self.text, ends))


def read_axis(text: str) -> Axis:
    """Read `KEY=A,B,C`, `KEY=LOW..HIGH`, `KEY=LOW..HIGH:log`, or with a number of points behind it, which are listed.

    Raises:
        ConfigError: it is none of these.
    """
    key, _, values = text.partition("=")
    listed = tuple(dict.fromkeys(value.strip() for value in values.split(",")))
    if not key or not all(listed):
        raise ConfigError(f"--over must be {FORMS}; got {text!r}. Write it as optimizer.lr=0.001..0.1:log.")
    if ".." not in values:
        return Axis(key, listed)
    match = _RANGE.fullmatch(values)
    low, high = (float(match[1]), float(match[2])) if match else (1.0, 0.0)
    points = int(match[4]) if match and match[4] else None
    if match is None or not low < high or (match[3] and low <= 0) or points in (0, 1):
        raise ConfigError(
            f"--over {key} must be LOW..HIGH with two numbers, of which the first is the smaller one, above 0 with "
            f":log, and at least 2 POINTS where they are counted; got {values!r}."
        )
    axis = Axis(key, (), low, high, bool(match[3]), match[1].isdigit() and match[2].isdigit())
    if points is None:
        return axis
    return Axis(key, tuple(dict.fromkeys(_value(axis, i / (points - 1)) for i in range(points))))


def _value(axis: Axis, part: float) -> str:
    """Return the value after a part of the range."""
    value = axis.low * (axis.high / axis.low) ** part if axis.log else axis.low + (axis.high - axis.low) * part
    return axis.text(round(value) if axis.whole else value)


def grid(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """List all combinations of values.

    Raises:
        ConfigError: the values of a range are not counted.
    """
    for axis in axes:
        if not axis.values:
            raise ConfigError(
                f"--over {axis.key} must list values, or count those of a range, for --sampler grid; got a range. "
                f"Write {axis.key}=LOW..HIGH:5, or take another sampler."
            )
    return [dict(zip((axis.key for axis in axes), values)) for values in itertools.product(*(a.values for a in axes))]


def points(sweep: Sweep) -> list[dict[str, str]]:
    """List the trials of a sweep: all combinations of a grid, or as many as were asked for, which are yet to be drawn.

    Raises:
        ConfigError: as of `read_axis` and `grid`.
    """
    axes = list(map(read_axis, sweep.over))
    return grid(axes) if sweep.sampler == "grid" else [{}] * sweep.trials
