"""Write numbers and names as people read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from hpcdist.tools.statistics import Interval, geometric

MINUS, NONE = "−", "–"
ROUNDING = 1e-6  # relative differences below are those of sums in another order
LEAST = 1e-9  # seconds, joules, samples: no clock or counter sees less, which sums in another order leave
UNITS = ("B", "kB", "MB", "GB", "TB")


# --- numbers ----------------------------------------------------------------------------------------------------------
def number(value: float, precision: int = 3) -> str:
    """Write a number with so many digits that matter, and no exponent where that is readable."""
    value = 0.0 if abs(value) < LEAST else value
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{precision}g}"
    digits = max(0, precision - 1 - math.floor(math.log10(abs(value)))) if value else 0
    whole = math.isclose(value, round(value), rel_tol=1e-9)
    return f"{value:,.{0 if whole else digits}f}".replace(",", "\N{NO-BREAK SPACE}").replace("-", MINUS)


def seconds(value: float) -> str:
    """Write a time."""
    return f"{number(value)} s"


def estimate(found: Interval | None, write: Callable[..., str] = number, unit: str = "", *half: int) -> str:
    """Write a mean or a ratio and its interval, as long as rounding alone does not make it; or that there is none.

    Args:
        half: more arguments of `write` for half the width of an interval that is symmetric.
    """
    if found is None:
        return NONE
    if not found.half > max(ROUNDING * abs(found.mean), LEAST):
        return write(found.mean) + unit
    if found.is_symmetric:
        return f"{write(found.mean)} ± {write(found.half, *half)}{unit}"
    return f"{write(found.mean)}{unit} ({write(found.low)} to {write(found.high)})"


def plain(found: Interval | None, unit: str = "") -> str:
    """Write a mean and its interval, or that there is none."""
    return estimate(found, number, unit, 2)


def amount(found: Interval | float | None) -> str:
    """Write a number of bytes, or a mean number and its interval."""
    if not isinstance(found, Interval):
        return NONE if found is None else amount(Interval(found))
    scale, unit = bytes_unit(found.mean)
    return plain(found.scaled(1 / scale), f" {unit}")


def bytes_unit(n_bytes: float) -> tuple[float, str]:
    """Return how many bytes the unit has that suits a number of them, and its sign."""
    power = min(4, int(math.log10(max(1, abs(n_bytes))) // 3))
    return 1000.0**power, UNITS[power]


def times(found: Interval | None) -> str:
    """Write a ratio with its interval."""
    return estimate(found, "{:.3g}".format)


def seconds_to_target(reached: Collection[float], tried: int) -> str:
    """Write the geometric mean of the seconds to the target; none where a run has not reached it, and is in no mean."""
    if not reached:
        return "not reached"
    return f"{number(min(reached))} at best" if len(reached) < tried else estimate(geometric(list(reached)))


# --- a metric ---------------------------------------------------------------------------------------------------------
def is_share(metric: str) -> bool:
    """Tell whether a metric is written in percent."""
    return "accuracy" in metric


def value(metric: str, number: float) -> str:
    """Write a metric's value: an accuracy in percent."""
    return f"{100 * number:.4g} %" if is_share(metric) else f"{number:.4g}"


def mean(metric: str, found: Interval | None) -> str:
    """Write a metric's mean and its interval."""
    if found is None or not found.half > ROUNDING * abs(found.mean):
        return NONE if found is None else value(metric, found.mean)
    if not is_share(metric):
        return f"{found.mean:.4g} ± {found.half:.2g}"
    if found.is_symmetric:
        return f"{100 * found.mean:.2f} ± {100 * found.half:.2g} %"
    return f"{100 * found.mean:.2f} % ({100 * found.low:.4g} to {100 * found.high:.4g})"


def gap(metric: str, number: float, *, sign: bool = True, unit: bool = True) -> str:
    """Write a difference of a metric's values: of accuracies in percentage points."""
    number = round(number, 12) + 0.0  # what rounding leaves of two equal means is no difference, nor is -0
    text = f"{number * (100 if is_share(metric) else 1):{'+' if sign else ''}.2g}".replace("-", MINUS)
    return text + " points" * (unit and is_share(metric))


def gap_of(metric: str, found: Interval | None, *, is_same: bool = False) -> str:
    """Write such a difference with its interval, or that there is none, for tables."""
    if found is None or is_same:
        return NONE if found is None else "0"
    return gap(metric, found.mean, unit=False) + ("" if math.isnan(found.low) else f" ({gap_span(metric, found)})")


def gap_span(metric: str, found: Interval) -> str:
    """Write the interval of such a difference."""
    return f"{gap(metric, found.low, unit=False)} to {gap(metric, found.high, unit=False)}"


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
