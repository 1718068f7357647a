"""Works of calls in flight, and the queue whose thread makes these."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

from hpcdist.comm.work import RELEASED, CallQueue, Work
from hpcdist.errors import CommunicationError, ConfigError, DeadlineError

SHORT = timedelta(seconds=0.01)


@pytest.fixture
def queue():
    made = CallQueue(threaded=True)
    yield made
    made.close()


def test_a_wait_ends_at_its_limit(queue):
    may_go = threading.Event()
    work = queue.submit(may_go.wait, [torch.ones(1)])
    with pytest.raises(DeadlineError, match="the end of a call in flight did not happen within 0.01 s"):
        work.wait(SHORT)
    assert not work.is_completed() and not work.is_success() and queue.busy
    may_go.set()
    assert work.wait() and work.wait(SHORT) and work.is_success() and work.result() == [torch.ones(1)]
    assert not queue.busy


def test_a_future_is_there_when_the_call_is_over_and_at_once_from_then_on(queue):
    may_go = threading.Event()
    work = queue.submit(may_go.wait, 5)
    before = work.get_future().then(lambda future: (future.value(), work.is_completed()))
    assert not before.done()
    may_go.set()
    assert before.wait() == (5, True) and work.get_future().done()
    failed = queue.submit(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        failed.get_future().wait()
    assert isinstance(failed.exception(), ZeroDivisionError) and not failed.is_success()


def test_calls_are_made_in_their_order_also_those_that_block_and_those_inside_another(queue):
    made, may_go = [], threading.Event()

    def outer() -> None:
        may_go.wait()
        queue.run(lambda: made.append("inside"))
        made.append("outer")

    queue.submit(outer)
    threading.Timer(0.05, may_go.set).start()
    queue.run(lambda: made.append(threading.current_thread().name))
    queue.run(lambda: made.append(threading.current_thread().name))
    assert made == ["inside", "outer", "hpcdist-calls", "MainThread"]


def test_what_is_behind_a_call_that_failed_fails_likewise_until_somebody_knows(queue):
    def fail() -> None:
        raise CommunicationError("rank 1 died")

    made, may_go = [], threading.Event()
    queue.submit(may_go.wait)
    first, second = queue.submit(fail), queue.submit(lambda: made.append(2))
    may_go.set()
    for work in (first, second):
        with pytest.raises(CommunicationError, match="rank 1 died"):
            work.wait()
    queue.submit(lambda: made.append(3)).wait()
    assert made == [3]


def test_an_error_of_an_argument_is_that_of_one_call_alone_and_raised_at_the_end_at_the_latest():
    def fail() -> None:
        raise ConfigError("out must be a list")

    queue, made = CallQueue(threaded=True), []
    queue.submit(fail)
    queue.submit(lambda: made.append(2)).wait()
    with pytest.raises(ConfigError, match="out must be a list"):
        queue.close()
    assert made == [2]


def test_without_a_thread_a_call_is_over_when_its_work_is_there():
    queue = CallQueue(threaded=False)
    work = queue.submit(lambda: 1 / 0)
    assert work.is_completed() and isinstance(work.exception(), ZeroDivisionError) and not queue.busy
    assert queue.run(lambda: None) is None and queue.run(lambda: None, 3, async_op=True).result() == 3
    queue.close()


def test_a_work_of_what_polls_and_what_blocks_ends_once():
    ended, there = [], []
    work = Work("found", lambda: bool(there), lambda: there.append(1), lambda: ended.append(1), source=3)
    assert not work.is_completed() and work.source_rank() == 3
    with pytest.raises(DeadlineError):
        work.wait(SHORT)
    both = Work.of_all([work, Work()], None)
    assert not both.is_completed() and both.wait() and both.is_completed() and work.is_completed()
    assert work.get_future().value() == "found" and work.wait() and ended == [1]
    failed = Work(None, lambda: True, lambda: None, lambda: 1 / 0)
    assert failed.is_completed()
    with pytest.raises(ZeroDivisionError):
        failed.synchronize()


def test_a_work_may_end_after_the_modules_that_it_uses(monkeypatch):
    """As at the end of Python, which sets their globals to None, while C++ still holds the work."""
    monkeypatch.setattr("hpcdist.comm.work.torch", None)
    monkeypatch.setattr("hpcdist.comm.work.KEPT_BYTES", None)
    for tensors, kept in (([torch.ones(3)], 1), ([torch.ones(5000)], 0), ([torch.eye(2).to_sparse()], 0)):
        Work(tensors, queued=True).__del__()
        assert len(RELEASED.pop().tensors) == kept
