"""Works: how long they are waited for, and who is called when they are over."""

from __future__ import annotations

import pytest

from hpcdist.collectives.calls.work import Work
from hpcdist.errors import DeadlineError


def test_a_wait_ends_at_its_limit():
    work = Work(lambda: None)
    with pytest.raises(DeadlineError, match="a collective call was not over after 0.01 s"):
        work.wait(0.01)
    work.run()
    work.wait(0.01)


def test_followers_are_called_when_a_call_is_over_and_at_once_from_then_on():
    called, work = [], Work(lambda: 1 / 0)
    work.when_over(lambda: called.append(("before", work.done())))
    assert not called and work.error is None
    work.run()
    work.when_over(lambda: called.append(("after", work.done())))
    assert called == [("before", True), ("after", True)] and isinstance(work.error, ZeroDivisionError)
