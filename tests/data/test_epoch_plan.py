"""An epoch's plan: every sample exactly once, and the same for any number of workers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import each
from hpcdist.data import EpochPlan
from hpcdist.errors import ConfigError

SIZES = {"n": st.integers(1, 200), "workers": st.integers(1, 17), "batch_size": st.integers(1, 33)}
PLAN = {**SIZES, "seed": st.integers(0, 5), "epoch": st.integers(0, 3), "shuffle": st.booleans()}


def seen(plan: EpochPlan, steps: int | None = None) -> np.ndarray:
    """All samples of the first `steps` steps, in step and worker order."""
    steps = plan.steps if steps is None else steps
    parts = [plan.indices(step, worker) for step in range(steps) for worker in range(plan.workers)]
    return np.concatenate([np.empty(0, np.int64), *parts])


@settings(max_examples=100, deadline=None)
@given(**PLAN)
def test_each_sample_is_seen_once_in_full_batches_and_by_all_workers_as_by_one(
    n, workers, batch_size, seed, epoch, shuffle
):
    plan = EpochPlan(n, workers, batch_size, seed=seed, epoch=epoch, shuffle=shuffle)
    np.testing.assert_array_equal(np.sort(seen(plan)), np.arange(n))
    assert seen(plan).dtype == np.int64
    alone = EpochPlan(n, 1, workers * batch_size, seed=seed, epoch=epoch, shuffle=shuffle)
    assert plan.steps == alone.steps
    for step in range(plan.steps):
        parts = [plan.indices(step, worker) for worker in range(workers)]
        np.testing.assert_array_equal(np.concatenate(parts), alone.indices(step, 0))
        sizes = plan.sizes(step)
        assert sizes == tuple(map(len, parts))
        full, rest = divmod(sum(sizes), batch_size)
        assert sizes == ((batch_size,) * full + (rest,) + (0,) * workers)[:workers] and sum(sizes) > 0
        assert step == plan.steps - 1 or full == workers
        assert plan.position(step + 1) - plan.position(step) == sum(sizes)
    assert (plan.position(0), plan.position(plan.steps)) == (0, n)


@settings(max_examples=50, deadline=None)
@given(**PLAN, workers_after=st.integers(1, 9), batch_size_after=st.integers(1, 20), data=st.data())
def test_resuming_on_other_workers_gives_exactly_the_rest(
    n, workers, batch_size, seed, epoch, shuffle, workers_after, batch_size_after, data
):
    before = EpochPlan(n, workers, batch_size, seed=seed, epoch=epoch, shuffle=shuffle)
    done = data.draw(st.integers(0, before.steps))
    after = EpochPlan(
        n, workers_after, batch_size_after, seed=seed, epoch=epoch, shuffle=shuffle, start=before.position(done)
    )
    np.testing.assert_array_equal(np.concatenate([seen(before, done), seen(after)]), seen(before))


@settings(max_examples=50, deadline=None)
@given(**PLAN, start=st.integers(0, 200))
def test_a_plan_may_start_anywhere(n, workers, batch_size, seed, epoch, shuffle, start):
    whole = EpochPlan(n, workers, batch_size, seed=seed, epoch=epoch, shuffle=shuffle)
    rest = whole.at(epoch, min(start, n))
    np.testing.assert_array_equal(seen(rest), seen(whole)[rest.start :])
    assert rest.position(0) == rest.start and rest.position(rest.steps) == n


def test_order_depends_on_seed_and_epoch_alone():
    def order(**options):
        return seen(EpochPlan(1000, 3, 7, **options)).tolist()

    assert order(seed=1, epoch=2) == order(seed=1, epoch=2)
    different = [order(seed=s, epoch=e) for s, e in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert all(a != b for i, a in enumerate(different) for b in different[:i])
    assert order(shuffle=False) == list(range(1000))


def test_order_is_what_it_has_always_been():
    """A run may be resumed only where the order is the same as before; NumPy may change it in a new release."""
    assert seen(EpochPlan(10, 2, 3, seed=3, epoch=4)).tolist() == [7, 2, 3, 4, 9, 6, 8, 0, 1, 5]


def test_the_indices_belong_to_the_caller_and_a_pickled_plan_is_equal_and_small():
    plan = EpochPlan(100_000, 2, 10, seed=1)
    plan.indices(0, 0)[:] = -1
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan and len(pickle.dumps(plan)) < 1000 and plan.indices(0, 0).min() >= 0
    np.testing.assert_array_equal(copy.indices(5, 1), plan.indices(5, 1))


def test_a_finished_epoch_has_no_steps():
    plan = EpochPlan(10, 2, 3, start=10)
    assert plan.steps == 0 and plan.position(0) == 10


@each(
    "case",
    [
        ("n_samples", 0, "at least 1"),
        ("workers", 0, "at least 1"),
        ("batch_size", -2, "at least 1"),
        ("batch_size", 2.5, "a whole number"),
        ("seed", -1, "at least 0"),
        ("epoch", -1, "at least 0"),
        ("start", 11, r"in 0\.\.10"),
        ("start", -1, r"in 0\.\.10"),
    ],
)
def test_numbers_out_of_range_are_refused(case):
    setting, value, rule = case
    with pytest.raises(ConfigError, match=f"{setting} must be {rule}; got {value}."):
        EpochPlan(**{"n_samples": 10, "workers": 2, "batch_size": 3, setting: value})


@each("number", [-1, 2])
def test_a_step_or_a_worker_that_there_is_not_is_refused(number):
    plan = EpochPlan(10, 2, 3)
    with pytest.raises(ConfigError, match=rf"step must be in 0\.\.1; got {number}."):
        plan.indices(number, 0)
    with pytest.raises(ConfigError, match=rf"worker must be in 0\.\.1; got {number}."):
        plan.indices(0, number)
    with pytest.raises(ConfigError, match="step must be in"):
        plan.position(4)
