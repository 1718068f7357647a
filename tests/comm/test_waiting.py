"""Waiting with a deadline."""

from __future__ import annotations

import math
import time

import pytest

from hpcdist.comm.waiting import wait_until
from hpcdist.errors import DeadlineError


def test_it_returns_at_once_or_soon_after_the_condition_holds_and_raises_what_that_raises():
    assert wait_until(lambda: True, 0.0, str) == 0.0
    with pytest.raises(ZeroDivisionError):
        wait_until(lambda: 1 / 0, 1, str)
    until = time.perf_counter() + 0.1
    waited_s = wait_until(lambda: time.perf_counter() >= until, math.inf, str)
    assert 0.09 < waited_s < 60


def test_a_long_wait_asks_seldom():
    asked, used = [], time.process_time()
    until = time.perf_counter() + 0.3
    wait_until(lambda: asked.append(1) or time.perf_counter() >= until, 60, str)
    assert len(asked) < 1000, "back-off must leave the core to others"
    assert time.process_time() - used < 0.15


def test_pauses_stay_below_their_longest(monkeypatch):
    pauses, sleep = [], time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: pauses.append(seconds) or sleep(seconds))
    until = time.perf_counter() + 0.2
    wait_until(lambda: time.perf_counter() >= until and len(pauses) > 20, 60, str, longest_s=1e-4)
    assert pauses == sorted(pauses) and max(pauses) == 1e-4


def test_past_the_deadline_it_says_what_did_not_happen():
    start = time.perf_counter()
    with pytest.raises(DeadlineError, match=r"^the kettle's whistle did not happen within 0.05 s\.$"):
        wait_until(lambda: False, 0.05, lambda: "the kettle's whistle")
    assert time.perf_counter() - start >= 0.05


def test_a_rank_that_can_be_woken_sleeps_for_the_longest_pause_at_once():
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        return len(slept) % 2 == 0

    wait_until(lambda: len(slept) > 3, 60, str, longest_s=1e-4, sleep=sleep)
    assert slept == [1e-4] * 4
    with pytest.raises(DeadlineError, match="the bell"):
        wait_until(lambda: False, 0.01, lambda: "the bell", sleep=sleep)
