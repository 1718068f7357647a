"""Cuts are the best of all cuts, and keep their limits."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdist.errors import ConfigError
from hpcdist.parallel.cut import Cut, balance, by_hand

layers = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(1, 3), st.booleans()), min_size=1, max_size=8
)


def every_cut(n, stages):
    return [Cut((0, *inner, n)) for inner in combinations(range(1, n), stages - 1)]


@given(layers, st.data())
def test_the_best_of_all_cuts(layers, data):
    costs, memory, boundaries, needed = map(list, zip(*layers))
    stages = data.draw(st.integers(1, len(layers)))
    limit = data.draw(st.one_of(st.none(), st.integers(1, 40)))

    def price(cut):
        parts = [[costs[i] for i in cut.layers(stage)] for stage in range(stages)]
        sent = sum(boundaries[bound - 1] for bound in cut.bounds[1:-1])
        return max(map(sum, parts)), sent, sum(sum(part) ** 2 for part in parts)

    def fits(cut):
        parts = [cut.layers(stage) for stage in range(stages)]
        return all(any(needed[i] for i in part) for part in parts) and (
            limit is None or all(sum(memory[i] for i in part) <= limit for part in parts)
        )

    possible = [price(cut) for cut in every_cut(len(layers), stages) if fits(cut)]
    if not possible:
        few = sum(needed) < stages
        with pytest.raises(ConfigError, match="stages must be 1 to" if few else "each stage must be at most"):
            balance(costs, stages, memory, limit, boundaries, needed)
        return
    found = balance(costs, stages, memory, limit, boundaries, needed)
    assert fits(found) and found.stages == stages and price(found) == min(possible)


def test_a_cut():
    cut = by_hand([3, 3, 2], 8)
    assert cut == Cut((0, 3, 6, 8)) and cut.stages == 3 and cut.layers(2) == range(6, 8) and str(cut) == "3,3,2"
    assert str(balance([1] * 10, 4)) in ("3,3,2,2", "2,2,3,3", "2,3,2,3", "2,3,3,2", "3,2,2,3", "3,2,3,2")


def test_stages_that_keep_different_numbers_of_micro_batches():
    cut = balance([1] * 6, 3, lambda stage, layers: (3 - stage) * len(layers), limit_bytes=4)
    assert cut.bounds == (0, 1, 3, 6), "the first stages have room for fewer layers"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: balance([1, 2], 3), "stages must be 1 to the model's number of layers, 2; got 3"),
        (
            lambda: balance([1, 2], 2, needed=[True, False]),
            "stages must be 1 to the model's number of layers with parameters, 1; got 2. Take fewer",
        ),
        (lambda: balance([1, float("nan")], 1), "costs of layers must be finite and at least 0; got"),
        (lambda: balance([1, 2], 2, [3, 5], 4), "at most 4 bytes; got 5 of layer 1 alone. Raise"),
        (lambda: balance([1] * 4, 2, [2, 2, 2, 3], 4), r"at most 4 bytes; got 5 of stage 1 \(layers 2 to 3\) in the"),
        (lambda: by_hand([2, 2], 5), "whose sum is the model's 5; got 2, 2. Change them"),
        (lambda: by_hand([5, 0], 5), "at least 1 for each stage, whose sum is the model's 5; got 5, 0"),
        (lambda: Cut((0, 2, 2)), r"bounds of stages must ascend from 0; got \(0, 2, 2\)"),
    ],
)
def test_a_cut_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
