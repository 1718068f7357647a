"""Confidence intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hpcdist.tools.statistics import binomial_variance, effect, holm, interval, ratio_of
from kit.pairs import difference, excludes, ratio


def test_the_interval_is_students_and_unknown_of_one_value():
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.half == pytest.approx(2.7764451 * math.sqrt(2.5 / 5)), "t of 4 degrees of freedom, from a table"
    assert (found.low, found.high) == pytest.approx((3.0 - found.half, 3.0 + found.half))
    assert f"{found:.2f}" == "3.00 ± 1.96" and f"{interval([1.0, 2.0, 3.0]):+.1f}" == "+2.0 ± 2.5"
    assert excludes(found, 1.0) and excludes(found, 5.0) and not excludes(found, 2.0)
    for values in ([2.0], [2.0, 2.0]):
        found = interval(values)
        assert found.mean == 2.0 and math.isnan(found.half) and math.isnan(found.low) and not excludes(found, 0.0)
        assert f"{found:.1f}" == "2.0"


def test_an_interval_that_ends_at_a_bound_is_written_with_both_ends():
    found = interval([0.9, 1.0, 0.95]).clipped(0.0, 1.0)
    assert found.high == 1.0 and f"{found:.3f}" == "0.950 (0.826 to 1)"
    assert math.isnan(interval([0.9, 1.0]).clipped(0.0, 1.0).high)


def test_equal_shares_have_the_noise_of_their_test_set():
    for share, low in ((1.0, 0.9905), (0.98, 0.9595)):
        found = interval([share] * 3, min_variance=binomial_variance(share, 360))
        assert found.low == pytest.approx(low, abs=2e-4), "z of 4.3 and a standard error of at least sqrt(p(1-p)/n/3)"
    assert interval([0.9, 0.8, 0.7], min_variance=1e-9) == interval([0.9, 0.8, 0.7])
    one_sample_more = effect({0: 0.5, 1: 0.5, 2: 0.5}, {0: 0.49, 1: 0.49, 2: 0.49}, min_variance=0.01 * 0.99 / 100)
    assert one_sample_more.low < 0 < one_sample_more.high and one_sample_more.p == pytest.approx(0.22, abs=0.02)


def test_it_holds_the_true_mean_as_often_as_it_says():
    for confidence in (0.5, 0.95):
        generator = np.random.default_rng(0)
        drawn = [interval(generator.normal(1.0, 3.0, 5).tolist(), confidence) for _ in range(2000)]
        assert np.mean([i.low <= 1.0 <= i.high for i in drawn]) == pytest.approx(confidence, abs=0.03)


def test_runs_of_the_same_seed_are_compared_pair_by_pair():
    values, others = [3.0, 5.0, 9.0], [2.0, 4.0, 6.0]
    assert difference(values, others) == interval([1.0, 1.0, 3.0])
    assert ratio(values, others) == interval([1.5, 1.25, 1.5])
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        difference(values, others[:2])


# --- tests of differences; numbers by scipy.stats ---------------------------------------------------------------------
def test_runs_of_the_same_seeds_are_compared_pair_by_pair():
    found = effect({0: 2.0, 1: 4.0, 2: 6.0}, {0: 1.0, 1: 2.0, 2: 3.0})
    assert found.paired and found.mean == 2.0
    assert (found.low, found.high, found.p) == pytest.approx((-0.4841377, 4.4841377, 0.0741799))


def test_runs_of_other_seeds_are_compared_as_groups():
    found = effect({0: 1.0, 1: 3.0, 2: 4.0}, {0: 2.0, 5: 6.0, 6: 9.0, 7: 5.0})
    assert not found.paired and found.mean == pytest.approx(-2.8333333)
    assert (found.low, found.high, found.p) == pytest.approx((-7.2724652, 1.6057985, 0.1587671))


def test_a_ratio_is_that_of_logarithms():
    found = ratio_of({0: 2.0, 1: 8.0, 2: 8.0}, {0: 1.0, 1: 2.0, 2: 1.0})
    half = 4.3026527 * math.log(2) / math.sqrt(3)  # t of two degrees of freedom; logarithms are 1, 2 and 3 log 2
    assert found.mean == pytest.approx(4.0)
    assert (found.low, found.high) == pytest.approx((4 * math.exp(-half), 4 * math.exp(half)))


def test_fewer_than_three_seeds_tell_nothing():
    for values, others in (({0: 2.0}, {0: 1.0}), ({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.0}), ({0: 2.0, 1: 2.0}, {2: 1.0})):
        found = effect(values, others)
        assert found.mean == 1.0 and math.isnan(found.low) and math.isnan(found.high) and math.isnan(found.p)
    assert math.isnan(effect({0: 2.0, 1: 3.0, 2: 4.0}, {0: 1.0, 4: 2.0}).p), "of either side"


def test_differences_that_a_rule_computes_have_no_noise():
    assert effect({0: 2.0, 1: 3.0, 2: 4.0}, {0: 1.0, 1: 2.0, 2: 3.0}).p == 0.0
    assert effect({0: 2.0, 1: 3.0, 2: 4.0}, {0: 2.0, 1: 3.0, 2: 4.0}).p == 1.0


def test_holms_correction():
    assert holm([0.01, 0.04, math.nan, 0.03])[::3] == pytest.approx([0.03, 0.06])
    corrected = holm([0.01, 0.04, math.nan, 0.03])
    assert corrected[1] == pytest.approx(0.06) and math.isnan(corrected[2]), "never below a smaller one's"
    assert holm([0.6, 0.9]) == [1.0, 1.0]
