"""The search space of a sweep: settings and their possible values."""

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
    """One setting of a sweep and its values: a list, or a range.

    Attributes:
        values: listed values, as for `--set`; empty for a range.
        log: logarithmic scale.
        whole: integers only.
    """

    key: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    def contains(self, text: str) -> bool:
        """Return whether a value, written as for `--set`, lies on the axis."""
        return text in self.values if self.values else math.isfinite(self.position(text))

    def position(self, text: str) -> float:
        """Return a value's position between 0 and 1, by list index or in the range; NaN if the range is one point."""
        if self.values:
            return self.values.index(text) / max(1, len(self.values) - 1)
        value, low, high = (math.log(float(x)) if self.log else float(x) for x in (text, self.low, self.high))
        return (value - low) / (high - low) if low < high else math.nan

    def text(self, value: object) -> str:
        """Format a value as for `--set`."""
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the listed values, or both ends of the range."""
        ends = (int(self.low), int(self.high)) if self.whole else (self.low, self.high)
        return self.values or tuple(map(self.text, ends))


def read_axis(text: str) -> Axis:
    """Parse `KEY=A,B,C`, `KEY=LOW..HIGH` or `KEY=LOW..HIGH:log`; a number of points (`:5`) turns a range into a list.

    Raises:
        ConfigError: the text has none of these forms.
    """
    key, _, values = text.partition("=")
    listed = tuple(dict.fromkeys(value.strip() for value in values.split(",")))
    if not key or not all(listed):
        raise ConfigError(f"--over must be {FORMS}; got {text!r}. Write it as optimizer.lr=0.001..0.1:log.")
    if ".." not in values:
        return Axis(key, listed)
    match = _RANGE.fullmatch(values)
    low, high = (float(match[1]), float(match[2])) if match else (1.0, 0.0)  # the latter is refused below
    points = int(match[4]) if match and match[4] else None
    if match is None or not low < high or (match[3] and low <= 0) or points in (0, 1):
        raise ConfigError(
            f"--over {key} must be LOW..HIGH with LOW < HIGH, LOW above 0 with :log, and 2 POINTS or more if any; got "
            f"{values!r}."
        )
    axis = Axis(key, (), low, high, bool(match[3]), match[1].isdigit() and match[2].isdigit())
    if points is None:
        return axis
    return Axis(key, tuple(dict.fromkeys(_value(axis, i / (points - 1)) for i in range(points))))


def _value(axis: Axis, part: float) -> str:
    """Return the value at a fraction of the range."""
    value = axis.low * (axis.high / axis.low) ** part if axis.log else axis.low + (axis.high - axis.low) * part
    return axis.text(round(value) if axis.whole else value)


def grid(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """List all combinations of values; raise ConfigError if an axis is a range without a number of points."""
    for axis in axes:
        if not axis.values:
            raise ConfigError(
                f"--over {axis.key} must be a list, or a range with a number of points, for --sampler grid; got a "
                f"range. Write {axis.key}=LOW..HIGH:5, or take another sampler."
            )
    return [dict(zip((axis.key for axis in axes), values)) for values in itertools.product(*(a.values for a in axes))]


def points(sweep: Sweep) -> list[dict[str, str]]:
    """List the trials of a sweep: all combinations of a grid, or `trials` empty dicts, which the sampler fills in."""
    axes = list(map(read_axis, sweep.over))
    return grid(axes) if sweep.sampler == "grid" else [{}] * sweep.trials
