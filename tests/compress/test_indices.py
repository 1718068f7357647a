"""Sets of indices: every one comes back, in about as few bits as its entropy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdist.compress.coding import sparse

MOST = 1 << 31
WORDS = [469762048, 50332415, 1008898285, 4028502861, 49]
few = settings(max_examples=150, deadline=None)


@st.composite
def sets(draw) -> tuple[np.ndarray, int]:
    """Ascending indices, and what they are below: scattered ones, runs of neighbours, and gaps of any length."""
    count = draw(st.one_of(st.integers(1, 300), st.integers(1, MOST), st.sampled_from([MOST - 1, MOST])))
    found = draw(st.sets(st.integers(0, count - 1), max_size=60))
    start = draw(st.integers(0, count - 1))
    found |= set(range(start, min(count, start + draw(st.integers(0, 500)))))
    return np.array(sorted(found), np.int64), count


def random_set(density: float, count: int, seed: int = 0) -> np.ndarray:
    return np.flatnonzero(np.random.default_rng(seed).random(count) < density)


@few
@given(sets())
def test_every_set_comes_back(drawn):
    found, count = drawn
    words = sparse.encode_indices(found, count)
    assert words.dtype == np.uint32
    again = sparse.decode_indices(words, len(found), count)
    assert again.dtype == np.int64
    np.testing.assert_array_equal(again, found)


@pytest.mark.parametrize(
    ("found", "count"),
    [([], 0), ([], 9), ([0], 1), ([0], MOST), ([MOST - 1], MOST), ([0, MOST - 1], MOST), (range(1000), 1000)],
)
def test_the_ends_of_the_range_come_back(found, count):
    found = np.array(found, np.int64)
    np.testing.assert_array_equal(sparse.decode_indices(sparse.encode_indices(found, count), len(found), count), found)


@pytest.mark.parametrize("count", [0, 1, 1000, MOST])
def test_no_index_and_all_indices_take_no_words(count):
    assert len(sparse.encode_indices(np.empty(0, np.int64), count)) == 0
    if 0 < count < MOST:
        assert len(sparse.encode_indices(np.arange(count), count)) == 0


@pytest.mark.parametrize("density", [0.001, 0.003, 0.01, 0.05, 0.3, 0.5, 0.9])
def test_random_sets_take_their_entropy(density):
    count = round(20_000 / density)
    found = random_set(density, count)
    part = len(found) / count
    assert len(found) >= 10_000
    entropy = -(part * math.log2(part) + (1 - part) * math.log2(1 - part)) * count
    assert len(sparse.encode_indices(found, count)) * 32 == pytest.approx(entropy, rel=0.02)
    if density <= 0.01:  # as docstrings have it
        assert entropy / len(found) == pytest.approx(math.log2(1 / part) + 1.44, abs=0.02)


def test_a_set_unlike_a_random_one_takes_more_bits_but_comes_back():
    """All indices in one corner, as when one layer's gradients are the large ones."""
    found, count = np.arange(10_000) * 3 + (1 << 30), MOST
    words = sparse.encode_indices(found, count)
    np.testing.assert_array_equal(sparse.decode_indices(words, len(found), count), found)
    assert len(words) * 32 > 1.44 * len(found)


def test_words_are_the_same_whenever_and_wherever_they_are_made():
    """Sums of all ranks' messages are to be equal to the bit, so what a message says must not depend on the machine."""
    found = np.array([0, 1, 5, 130, 131, 4_000, 65_536, 99_999], np.int64)
    assert sparse.encode_indices(found, 100_000).tolist() == WORDS
    assert sparse.encode_indices(found.copy(), 100_000).tolist() == WORDS
