"""Settings that are searched for: each strategy at the rate that suits it best, found on seeds of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

FIRST_SEED = 1000  # of those that rates are chosen on: no result may come from them


def search(measure: Callable[[int], T], merit: Callable[[T], Any], guess: int, known: dict[int, T]) -> int:
    """Find the whole number with the least merit, such as a rate's power of 2: measure neighbours until it has both.

    Args:
        merit: of what was measured: the less the better.
        guess: where to begin, if nothing is known yet.
        known: what was measured before; what is measured now is added.
    """

    def best() -> int:
        return min(known, key=lambda number: merit(known[number]))

    around = best() if known else guess
    while missing := [number for number in (around - 1, around, around + 1) if number not in known]:
        for number in missing:
            known[number] = measure(number)
        around = best()
    return around


def search_within(
    runs: int, measure: Callable[[int, int], T], merit: Callable[[Sequence[T]], Any]
) -> tuple[int, dict[int, list[T]]]:
    """Search for the whole number with the least merit in so many runs; return it and what was measured.

    It begins at 0 and goes to where neighbours are better, each measured once. The runs that are left repeat the
    best one and its neighbours, so that luck counts for less.

    Args:
        measure: called with a number and how often that was measured before.
        merit: of all that was measured of a number.
    """
    known: dict[int, list[T]] = {}

    def best() -> int:
        return min(known, key=lambda number: merit(known[number]))

    for _ in range(runs):
        around = best() if known else 0
        near = (around, around - 1, around + 1)
        unknown = [number for number in near if number not in known]
        number = unknown[0] if unknown else min(near, key=lambda near: (len(known[near]), merit(known[near])))
        known.setdefault(number, []).append(measure(number, len(known.get(number, ()))))
    return best(), known
