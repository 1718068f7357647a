"""Which elements are worth naming, and messages that name them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.cases import each
from hpcdist.compress.coding import sparse
from hpcdist.compress.coding.sparse import Sample


def normal(count: int, seed: int = 0, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(dtype)


# --- above ------------------------------------------------------------------------------------------------------------
@each("dtype", [np.float32, np.float64])
@each("count", [0, 1, 7, (1 << 18) - 1, 1 << 18, (1 << 19) + 5])
def test_elements_above_a_bound_are_found_in_order_on_both_sides(count, dtype):
    values = normal(count, dtype=dtype)
    found = sparse.above(values, 2.0)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, np.flatnonzero(np.abs(values) > 2.0))


def test_elements_equal_to_the_bound_are_not_above_it():
    np.testing.assert_array_equal(sparse.above(np.array([1.0, -1.0, 1.5, -1.5, 0.0]), 1.0), [2, 3])
    assert len(sparse.above(np.zeros(5), 0.0)) == 0


# --- messages ---------------------------------------------------------------------------------------------------------
def test_a_message_holds_indices_and_what_belongs_to_them():
    found, values = np.array([0, 3, 4, 90, 99]), np.array([1.5, -2, 0.25, 3, -0.5], np.float32)
    signs = np.packbits(values > 0)
    message = sparse.pack(found, 100, np.array([7.0], np.float64), signs, values)
    assert message.dtype == torch.uint8 and message.ndim == 1
    assert len(message) == 4 + 8 + 1 + 5 * 4 + sparse.encode_indices(found, 100).nbytes
    payload = ((np.float64, 1), (np.uint8, -8), (np.float32, -1))
    again, (one, bits, numbers) = sparse.unpack(message, 100, payload)
    np.testing.assert_array_equal(again, found)
    np.testing.assert_array_equal(numbers, values)
    assert one.tolist() == [7.0]
    np.testing.assert_array_equal(np.unpackbits(bits, count=5), [1, 0, 1, 1, 0])


def test_a_message_may_start_at_any_byte():
    """As one does that was received behind others."""
    found, values = np.array([2, 5]), np.array([1.0, 2.0], np.float32)
    message = sparse.pack(found, 10, values)
    inside = torch.cat([torch.zeros(3, dtype=torch.uint8), message])[3:]
    again, (numbers,) = sparse.unpack(inside, 10, ((np.float32, -1),))
    np.testing.assert_array_equal(again, found)
    np.testing.assert_array_equal(numbers, values)


def test_a_message_without_elements_is_empty():
    assert len(sparse.pack(np.empty(0, np.int64), 10, np.ones(1, np.float32))) == 0


# --- the sample -------------------------------------------------------------------------------------------------------
@each("part", [0.001, 0.01, 0.1, 0.5])
def test_a_short_vector_is_looked_at_whole(part):
    values = normal(10_000)
    assert np.count_nonzero(np.abs(values) > Sample(10_000).bound(values, part)) == round(part * 10_000)


def test_about_the_wanted_part_lies_above_the_bound():
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
    for _ in range(10):
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
@each("count", [1, 2, 1000, 300_000, 1_000_003])
@each("part", [1e-6, 0.001, 0.02, 0.5, 1.0])
def test_the_largest_are_found_exactly(count, part, dtype):
    values, size = normal(count, seed=count, dtype=dtype), max(1, round(part * count))
    sample = Sample(count)
    expected = np.sort(np.argsort(-np.abs(values), kind="stable")[:size])
    for _ in range(3):
        np.testing.assert_array_equal(sample.largest(values, size), expected)


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
