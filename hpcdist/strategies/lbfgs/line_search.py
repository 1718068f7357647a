"""Search along a direction for a step of the strong Wolfe conditions."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple

RESOLUTION = 1e-12  # lengths that differ by less of themselves count as equal


class SearchPoint(NamedTuple):
    """A step length, the loss there, and its slope along the direction."""

    length: float
    loss: float
    slope: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.slope)


Search = Generator[float, tuple[float, float], SearchPoint | None]


def strong_wolfe(
    loss: float, slope: float, first: float, *, c1: float, c2: float, evaluations: int, noise: float = 0.0,
    longest: float = math.inf,
) -> Search:  # fmt: skip
    """Yield step lengths to try, receive (loss, slope) at each by `send`, and return the last one, which is the result.

    It satisfies f(α) ≤ f(0) + c₁αf'(0) and |f'(α)| ≤ c₂|f'(0)|; after all `evaluations` perhaps only the former; None
    if no trial did. A trial that is not finite counts as too far.

    Args:
        loss, slope: at length 0; the slope is negative.
        first: the first length tried.
        longest: the largest length; there the slope may be steeper.
        noise: differences of the loss up to which it counts as equal.

    Reference: Jorge Nocedal, Stephen Wright, "Numerical optimization", 2nd edition 2006, algorithms 3.5 and 3.6.
    """
    start = before = SearchPoint(0.0, loss, slope)
    length = first

    def too_high(trial: SearchPoint) -> bool:
        return not trial.is_finite or trial.loss > loss + c1 * trial.length * slope + noise

    def flat(trial: SearchPoint) -> bool:
        return abs(trial.slope) <= -c2 * slope

    low = high = start  # `low` is the best point so far with the first property
    while evaluations > 0:  # until a minimum lies between `low` and `high`
        here = SearchPoint(length, *(yield length))
        evaluations -= 1
        if too_high(here) or (before is not start and here.loss >= before.loss + noise):
            low, high = before, here
            break
        if flat(here):
            return here
        if here.slope >= 0:
            low, high = here, before
            break
        if here.length >= longest:
            return here
        before, length = here, min(_beyond(before, here), longest)
    else:
        return before if before is not start else None
    last = here
    while evaluations > 0 and abs(high.length - low.length) > RESOLUTION * max(high.length, low.length):
        length = _between(low, high)
        last = here = SearchPoint(length, *(yield length))
        evaluations -= 1
        if too_high(here) or here.loss >= low.loss + noise:
            high = here
            continue
        if flat(here):
            return here
        if here.slope * (high.length - low.length) >= 0:
            high = low
        low = here
    if low is start:
        return None
    if low is not last:
        yield low.length  # again, so that the caller has its gradient
    return low


def _beyond(before: SearchPoint, here: SearchPoint) -> float:
    """Return a longer step: the minimum of the cubic through both, but 1.1 to 10 times as long as `here`."""
    least, most = 1.1 * here.length, 10 * here.length
    return min(max(_cubic_minimum(before, here, default=most), least), most)


def _between(low: SearchPoint, high: SearchPoint) -> float:
    """Return a step between both: the minimum of the cubic through both, not too close to either."""
    middle, width = (low.length + high.length) / 2, abs(high.length - low.length)
    if not high.is_finite:
        return middle
    found = _cubic_minimum(low, high, default=middle)
    if abs(found - middle) <= 0.499 * width:
        return found
    return min(max(found, middle - 0.4 * width), middle + 0.4 * width)


def _cubic_minimum(a: SearchPoint, b: SearchPoint, default: float) -> float:
    """Return where the cubic with the losses and slopes of both has its minimum, equation 3.59; else `default`."""
    if a.length == b.length:
        return default
    d1 = a.slope + b.slope - 3 * (a.loss - b.loss) / (a.length - b.length)
    square = d1 * d1 - a.slope * b.slope
    if not square >= 0:
        return default
    d2 = math.copysign(math.sqrt(square), b.length - a.length)
    divisor = b.slope - a.slope + 2 * d2
    return b.length - (b.length - a.length) * (b.slope + d2 - d1) / divisor if divisor else default
