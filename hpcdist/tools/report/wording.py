"""Format numbers and names for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from hpcdist.tools.statistics import Interval, geometric

MINUS, NONE = "−", "–"
ROUNDING = 1e-6  # smaller relative differences come from the order of sums
LEAST = 1e-9  # seconds, joules, samples: smaller differences are rounding errors
UNITS = ("B", "kB", "MB", "GB", "TB")


# --- numbers ----------------------------------------------------------------------------------------------------------
def number(value: float, precision: int = 3) -> str:
    """Format a number with `precision` significant digits, without an exponent if that is readable."""
    value = 0.0 if abs(value) < LEAST else value
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{precision}g}"
    digits = max(0, precision - 1 - math.floor(math.log10(abs(value)))) if value else 0
    whole = math.isclose(value, round(value), rel_tol=1e-9)
    return f"{value:,.{0 if whole else digits}f}".replace(",", "\N{NO-BREAK SPACE}").replace("-", MINUS)


def seconds(value: float) -> str:
    """Format a time."""
    return f"{number(value)} s"


def estimate(ci: Interval | None, write: Callable[..., str] = number, unit: str = "", *half: int) -> str:
    """Format a mean or a ratio with its interval, unless that is only rounding; a dash for None.

    Args:
        half: more arguments of `write` for half the width of a symmetric interval.
    """
    if ci is None:
        return NONE
    if not ci.half > max(ROUNDING * abs(ci.mean), LEAST):
        return write(ci.mean) + unit
    if ci.is_symmetric:
        return f"{write(ci.mean)} ± {write(ci.half, *half)}{unit}"
    return f"{write(ci.mean)}{unit} ({write(ci.low)} to {write(ci.high)})"


def plain(ci: Interval | None, unit: str = "") -> str:
    """Format a mean with its interval; a dash for None."""
    return estimate(ci, number, unit, 2)


def amount(ci: Interval | float | None) -> str:
    """Format a number of bytes, or a mean of it with its interval."""
    if not isinstance(ci, Interval):
        return NONE if ci is None else amount(Interval(ci))
    scale, unit = bytes_unit(ci.mean)
    return plain(ci.scaled(1 / scale), f" {unit}")


def bytes_unit(n_bytes: float) -> tuple[float, str]:
    """Return the scale and the symbol of the unit that suits a number of bytes."""
    power = min(4, int(math.log10(max(1, abs(n_bytes))) // 3))
    return 1000.0**power, UNITS[power]


def times(ci: Interval | None) -> str:
    return estimate(ci, "{:.3g}".format)


def seconds_to_target(reached: Collection[float], tried: int) -> str:
    """Format the geometric mean of the seconds to the target, or the minimum if not all runs reached it."""
    if not reached:
        return "not reached"
    return f"{number(min(reached))} at best" if len(reached) < tried else estimate(geometric(list(reached)))


# --- a metric ---------------------------------------------------------------------------------------------------------
def is_share(metric: str) -> bool:
    """Return whether a metric is written in percent."""
    return "accuracy" in metric


def value(metric: str, number: float) -> str:
    """Format a metric's value, an accuracy in percent."""
    return f"{100 * number:.4g} %" if is_share(metric) else f"{number:.4g}"


def mean(metric: str, ci: Interval | None) -> str:
    """Format a metric's mean with its interval, an accuracy in percent; a dash for None."""
    if ci is None or not ci.half > ROUNDING * abs(ci.mean):
        return NONE if ci is None else value(metric, ci.mean)
    if not is_share(metric):
        return f"{ci.mean:.4g} ± {ci.half:.2g}"
    if ci.is_symmetric:
        return f"{100 * ci.mean:.2f} ± {100 * ci.half:.2g} %"
    return f"{100 * ci.mean:.2f} % ({100 * ci.low:.4g} to {100 * ci.high:.4g})"


def gap(metric: str, number: float, *, sign: bool = True, unit: bool = True) -> str:
    """Format a difference of a metric's values, of accuracies in percentage points."""
    number = round(number, 12) + 0.0  # removes rounding errors, and -0
    text = f"{number * (100 if is_share(metric) else 1):{'+' if sign else ''}.2g}".replace("-", MINUS)
    return text + " points" * (unit and is_share(metric))


def gap_of(metric: str, ci: Interval | None, *, is_same: bool = False) -> str:
    """Format such a difference with its interval, for tables; a dash for None."""
    if ci is None or is_same:
        return NONE if ci is None else "0"
    return gap(metric, ci.mean, unit=False) + ("" if math.isnan(ci.low) else f" ({gap_span(metric, ci)})")


def gap_span(metric: str, ci: Interval) -> str:
    return f"{gap(metric, ci.low, unit=False)} to {gap(metric, ci.high, unit=False)}"


# --- phrases ----------------------------------------------------------------------------------------------------------
def capital(text: str) -> str:
    """Capitalize the first letter only, which keeps names such as mIoU."""
    return text[:1].upper() + text[1:]


def joined(parts: Sequence[str]) -> str:
    """Join parts of a sentence with commas and a final `and`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
