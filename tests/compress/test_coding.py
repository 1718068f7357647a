"""Sparse messages: which elements are worth sending, and their indices in few bits; means of magnitudes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import each
from hpcdist.compress.coding import sparse
from hpcdist.compress.coding.elements import mean
from hpcdist.compress.coding.sparse import Sample

MOST = 1 << 31
WORDS = [469762048, 50332415, 1008898285, 4028502861, 49]


def normal(count: int, seed: int = 0, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(dtype)


def comes_back(found, count: int) -> np.ndarray:
    """Encode and decode indices; return the words between."""
    found = np.asarray(found, np.int64)
    words = sparse.encode_indices(found, count)
    again = sparse.decode_indices(words, len(found), count)
    assert words.dtype == np.uint32 and again.dtype == np.int64
    np.testing.assert_array_equal(again, found)
    return words


# --- indices ----------------------------------------------------------------------------------------------------------
@st.composite
def sets(draw) -> tuple[np.ndarray, int]:
    """Ascending indices, and what they are below: scattered ones, runs of neighbours, and gaps of any length."""
    count = draw(st.one_of(st.integers(1, 300), st.integers(1, MOST), st.sampled_from([MOST - 1, MOST])))
    found = draw(st.sets(st.integers(0, count - 1), max_size=60))
    start = draw(st.integers(0, count - 1))
    found |= set(range(start, min(count, start + draw(st.integers(0, 500)))))
    return np.array(sorted(found), np.int64), count


@settings(max_examples=60, deadline=None)
@given(sets())
def test_every_set_of_indices_comes_back(drawn):
    comes_back(*drawn)


def test_indices_at_the_ends_of_the_range_come_back():
    for found, count in (([0], 1), ([0], MOST), ([MOST - 1], MOST), ([0, MOST - 1], MOST)):
        comes_back(found, count)
    for count in (0, 1, 9, 1000, MOST):
        assert len(comes_back([], count)) == 0
        if 0 < count < MOST:
            assert len(comes_back(range(count), count)) == 0
    # All indices in one corner, as when one layer's gradients are the large ones.
    assert len(comes_back(np.arange(10_000) * 3 + (1 << 30), MOST)) * 32 > 1.44 * 10_000


@each("density", [0.003, 0.01, 0.3, 0.9])
def test_random_sets_take_their_entropy(density):
    count = round(20_000 / density)
    found = np.flatnonzero(np.random.default_rng(0).random(count) < density)
    part = len(found) / count
    assert len(found) >= 10_000
    entropy = -(part * math.log2(part) + (1 - part) * math.log2(1 - part)) * count
    assert len(sparse.encode_indices(found, count)) * 32 == pytest.approx(entropy, rel=0.02)
    if density <= 0.01:  # as docstrings have it
        assert entropy / len(found) == pytest.approx(math.log2(1 / part) + 1.44, abs=0.02)


def test_words_are_the_same_whenever_and_wherever_they_are_made():
    """Sums of all ranks' messages are to be equal to the bit, so what a message says must not depend on the machine."""
    found = [0, 1, 5, 130, 131, 4_000, 65_536, 99_999]
    assert comes_back(found, 100_000).tolist() == comes_back(found, 100_000).tolist() == WORDS


# --- elements above a bound -------------------------------------------------------------------------------------------
@each("dtype", [np.float32, np.float64])
@each("count", [0, 1, 7, (1 << 18) - 1, 1 << 18, (1 << 19) + 5])
def test_elements_above_a_bound_and_not_equal_to_it_are_found_in_order_on_both_sides(count, dtype):
    values = normal(count, dtype=dtype)
    found = sparse.above(values, 2.0)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, np.flatnonzero(np.abs(values) > 2.0))
    np.testing.assert_array_equal(sparse.above(np.array([1.0, -1.0, 1.5, -1.5, 0.0]), 1.0), [2, 3])
    assert len(sparse.above(np.zeros(5), 0.0)) == 0


# --- messages ---------------------------------------------------------------------------------------------------------
def test_a_message_holds_indices_and_what_belongs_to_them_and_may_start_at_any_byte():
    found, values = np.array([0, 3, 4, 90, 99]), np.array([1.5, -2, 0.25, 3, -0.5], np.float32)
    message = sparse.pack(found, 100, np.array([7.0], np.float64), np.packbits(values > 0), values)
    assert message.dtype == torch.uint8 and message.ndim == 1
    assert len(message) == 4 + 8 + 1 + 5 * 4 + sparse.encode_indices(found, 100).nbytes
    payload = ((np.float64, 1), (np.uint8, -8), (np.float32, -1))
    for before in range(4):  # bytes of another message in front
        inside = torch.cat([torch.zeros(before, dtype=torch.uint8), message])[before:]
        again, (one, bits, numbers) = sparse.unpack(inside, 100, payload)
        np.testing.assert_array_equal(again, found)
        np.testing.assert_array_equal(numbers, values)
        assert one.tolist() == [7.0] and np.unpackbits(bits, count=5).tolist() == [1, 0, 1, 1, 0]
    assert len(sparse.pack(np.empty(0, np.int64), 10, np.ones(1, np.float32))) == 0


# --- the sample -------------------------------------------------------------------------------------------------------
def test_about_the_wanted_part_lies_above_the_bound():
    values = normal(10_000)  # a short vector is looked at whole
    for part in (0.001, 0.01, 0.1, 0.5):
        assert np.count_nonzero(np.abs(values) > Sample(10_000).bound(values, part)) == round(part * 10_000)
    values = normal(1 << 20)
    sample = Sample(len(values))
    bounds = [sample.bound(values, 0.01) for _ in range(30)]
    parts = [np.mean(np.abs(values) > bound) / 0.01 for bound in bounds]
    assert len(set(bounds)) == 30, "each time other elements"
    assert np.mean(parts) == pytest.approx(1, abs=0.03)
    assert np.std(parts) == pytest.approx(1 / np.sqrt((1 << 16) * 0.01), rel=0.5)


@each("columns", [16, 64, 13, 1024])
def test_shapes_that_fit_a_stride_do_not_mislead_the_sample(columns):
    """Large elements in one column of a matrix, as the weights of one input: each 16th is met by no stride of 16."""
    count = columns * ((1 << 20) // columns)
    values = normal(count) * 0.01
    values.reshape(-1, columns)[:, 3] *= 1000
    sample = Sample(count)
    for _ in range(5):
        found = np.count_nonzero(np.abs(values) > sample.bound(values, 0.5 / columns))
        assert found / count * columns == pytest.approx(0.5, abs=0.15)


def test_the_bound_is_zero_where_all_elements_are_wanted_or_few_are_not_zero():
    values = np.zeros(1000, np.float32)
    assert Sample(1000).bound(values, 0.1) == 0
    values[:50] = 1
    assert Sample(1000).bound(values, 0.1) == 0
    assert Sample(1000).bound(normal(1000), 1.0) == 0
    assert Sample(0).bound(values[:0], 0.1) == 0


@each("dtype", [np.float32, np.float64])
@each("count", [1, 2, 1000, 300_000])
def test_the_largest_are_found_exactly(count, dtype):
    values = normal(count, seed=count, dtype=dtype)
    order, sample = np.argsort(-np.abs(values), kind="stable"), Sample(count)
    for part in (1e-6, 0.001, 0.02, 0.5, 1.0):
        size = max(1, round(part * count))
        for _ in range(2):
            np.testing.assert_array_equal(sample.largest(values, size), np.sort(order[:size]))


def test_of_equal_elements_the_first_are_taken_and_no_zeros():
    equal = np.array([1, -1, 0, 1, 3, -1, 0], np.float32)
    np.testing.assert_array_equal(Sample(7).largest(equal, 3), [0, 1, 4])
    np.testing.assert_array_equal(Sample(7).largest(equal, 6), [0, 1, 3, 4, 5])
    np.testing.assert_array_equal(Sample(7).largest(np.zeros(7), 2), [])
    many = np.ones(1 << 20, np.float32)
    many[-1] = 2
    np.testing.assert_array_equal(Sample(len(many)).largest(many, 1000), [*range(999), len(many) - 1])
    many[1000:] = 0
    np.testing.assert_array_equal(Sample(len(many)).largest(many, 10_000), np.arange(1000))


# --- means of magnitudes ----------------------------------------------------------------------------------------------
@each("order", [1, 2])
@each("dtype", [torch.float32, torch.float64])
def test_a_mean_of_powers_neither_overflows_nor_vanishes(order, dtype):
    info = torch.finfo(dtype)
    values = torch.from_numpy(normal(1000, dtype=np.float64)).to(dtype)
    expected = values.double().abs().pow(order).mean().pow(1 / order).item()
    assert mean(values, order) == pytest.approx(expected, rel=16 * info.eps)
    for size in (info.max, info.max / 3, info.smallest_normal, 1e-40):
        values = torch.full((7,), size, dtype=dtype)
        found = mean(values, order)
        assert math.isfinite(found) and found == pytest.approx(values[0].item(), rel=1e-6)
        assert found <= values[0].item() * (1 + 16 * info.eps)
    assert mean(torch.zeros(0, dtype=dtype), order) == mean(torch.zeros(3, dtype=dtype), order) == 0
