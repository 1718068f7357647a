"""Confidence intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hpcdist.study import interval


def test_the_interval_is_students():
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.half == pytest.approx(2.7764451 * math.sqrt(2.5 / 5)), "t of 4 degrees of freedom, from a table"
    assert (found.low, found.high) == (3.0 - found.half, 3.0 + found.half)
    assert f"{found:.2f}" == "3.00 ± 1.96"


def test_one_value_leaves_the_interval_unknown():
    found = interval([2.0])
    assert found.mean == 2.0 and math.isnan(found.half) and math.isnan(found.low)
    assert f"{found:.1f}" == "2.0"


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_it_holds_the_true_mean_as_often_as_it_says(confidence):
    generator = np.random.default_rng(0)
    drawn = [interval(generator.normal(1.0, 3.0, 5).tolist(), confidence) for _ in range(2000)]
    assert np.mean([i.low <= 1.0 <= i.high for i in drawn]) == pytest.approx(confidence, abs=0.03)
