"""Write numbers and names as people read them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from hpcdist.tools.statistics import Effect, Interval, geometric

MINUS, NONE = "−", "–"
ROUNDING = 1e-6  # relative differences below are those of sums in another order
UNITS = ("B", "kB", "MB", "GB", "TB")


# --- a metric ---------------------------------------------------------------------------------------------------------
def is_share(metric: str) -> bool:
    """Tell whether a metric is written in percent."""
    return "accuracy" in metric


def value(metric: str, number: float) -> str:
    """Write a metric's value: an accuracy in percent."""
    return f"{100 * number:.4g} %" if is_share(metric) else f"{number:.4g}"


def gap(metric: str, number: float, sign: bool = True) -> str:
    """Write a difference of a metric's values: of accuracies in percentage points."""
    number = round(number, 12) + 0.0  # what rounding leaves of two equal means is no difference, nor is -0
    text = f"{number * (100 if is_share(metric) else 1):{'+' if sign else ''}.2g}"
    return text.replace("-", MINUS)


def gap_unit(metric: str) -> str:
    """Return the unit of such a difference, with a space before it."""
    return " points" if is_share(metric) else ""


def gap_span(metric: str, found: Effect) -> str:
    """Write the interval of such a difference."""
    return f"{gap(metric, found.low)} to {gap(metric, found.high)}"


def mean(metric: str, found: Interval | None) -> str:
    """Write a metric's mean and its interval."""
    if found is None:
        return NONE
    if _is_exact(found):
        return value(metric, found.mean)
    if not is_share(metric):
        return f"{found.mean:.4g} ± {found.half:.2g}"
    return f"{100 * found.mean:.2f} ± {100 * found.half:.2g} %"


def _is_exact(found: Interval) -> bool:
    """Tell whether there is no interval to write: unknown, or no wider than rounding makes it."""
    return not found.half > ROUNDING * abs(found.mean)


# --- other numbers ----------------------------------------------------------------------------------------------------
def number(value: float, precision: int = 3) -> str:
    """Write a number with so many digits that matter, and no exponent where that is readable."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{precision}g}"
    digits = max(0, precision - 1 - math.floor(math.log10(abs(value)))) if value else 0
    whole = math.isclose(value, round(value), rel_tol=1e-9)
    return f"{value:,.{0 if whole else digits}f}".replace(",", "\N{NO-BREAK SPACE}").replace("-", MINUS)


def plain(found: Interval | None, unit: str = "") -> str:
    """Write a mean and its interval, or that there is none."""
    if found is None:
        return NONE
    return number(found.mean) + ("" if _is_exact(found) else f" ± {number(found.half, 2)}") + unit


def seconds(value: float) -> str:
    """Write a time."""
    return f"{number(value)} s"


def seconds_to_target(reached: Collection[float], tried: int) -> str:
    """Write the geometric mean of the seconds to the target; none where a run has not reached it, and is in no mean."""
    if not reached:
        return "not reached"
    if len(reached) < tried:
        return f"{number(min(reached))} at best"
    found = geometric(list(reached))
    if not found.high - found.low > ROUNDING * found.geometric_mean:
        return number(found.geometric_mean)
    return f"{number(found.geometric_mean)} ({number(found.low)} to {number(found.high)})"


def bytes_unit(n_bytes: float) -> tuple[float, str]:
    """Return how many bytes the unit has that suits a number of them, and its sign."""
    power = min(4, int(math.log10(max(1, abs(n_bytes))) // 3))
    return 1000.0**power, UNITS[power]


def amount(n_bytes: float) -> str:
    """Write a number of bytes."""
    return mean_amount(Interval(n_bytes, math.nan))


def mean_amount(found: Interval | None) -> str:
    """Write a mean number of bytes and its interval, or that there is none."""
    if found is None:
        return NONE
    scale, unit = bytes_unit(found.mean)
    return plain(Interval(found.mean / scale, found.half / scale), f" {unit}")


def times(found: Effect) -> str:
    """Write a ratio with its interval."""
    if not found.high - found.low > ROUNDING * found.mean:
        return f"{found.mean:.3g}"
    return f"{found.mean:.3g} ({found.low:.3g} to {found.high:.3g})"


def percent(found: Effect, parts: int) -> str:
    """Write a ratio's share of so many parts with its interval, in percent."""
    mean, low, high = (number(100 * value / parts) for value in (found.mean, found.low, found.high))
    return f"{mean} %" if math.isnan(found.low) or low == high else f"{mean} % ({low} to {high})"


# --- words ------------------------------------------------------------------------------------------------------------
def count(number: int, noun: str) -> str:
    """Write a number of things."""
    return f"{number} {noun}{'s' * (number != 1)}"


def capital(text: str) -> str:
    """Begin with a capital; the other letters stay, as in mIoU."""
    return text[:1].upper() + text[1:]


def joined(parts: Sequence[str]) -> str:
    """Write parts of a sentence, with an `and` before the last."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
