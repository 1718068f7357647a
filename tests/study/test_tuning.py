"""The search for the best rate."""

from __future__ import annotations

import pytest

from hpcdist.tools.tuning import search, search_within


@pytest.mark.parametrize("best", [-12, -3, 0, 1, 9])
def test_the_best_is_found_and_nothing_is_measured_twice(best):
    measured = []

    def measure(number: int) -> int:
        measured.append(number)
        return abs(number - best)

    assert search(measure, lambda found: found, 0, known := {}) == best
    assert sorted(measured) == sorted(known) and {best - 1, best, best + 1} <= set(known)
    measured.clear()
    assert search(measure, lambda found: found, -100, known) == best and not measured, "from what is known"


@pytest.mark.parametrize(("best", "runs"), [(0, 3), (2, 5), (-3, 6)])
def test_a_search_within_so_many_runs(best, runs):
    found, known = search_within(runs, lambda number, _: abs(number - best), lambda values: sum(values) / len(values))
    assert found == best and sum(map(len, known.values())) == runs
    assert {best - 1, best, best + 1} <= set(known)


def test_runs_that_are_left_repeat_the_best_and_its_neighbours():
    seen = []

    def measure(number: int, repeated: int) -> int:
        seen.append((number, repeated))
        return abs(number)

    assert search_within(8, measure, max)[0] == 0
    assert seen[:3] == [(0, 0), (-1, 0), (1, 0)] and seen[3] == (0, 1) and sorted(seen[6:])[-1] == (0, 2)
    assert search_within(1, measure, max) == (0, {0: [0]})
