"""Exceptions that nobody catches."""

from __future__ import annotations

import io
import re
import sys

import pytest

from hpcdist.errors import ConfigError, DeadlineError
from hpcdist.faults import excepthook, reporter


@pytest.fixture
def hook(monkeypatch):
    """Installs the hook for a rank and shows it an exception; the exit statuses that it asked for."""

    def show(rank: int | None, error: Exception) -> list[int]:
        statuses: list[int] = []
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        monkeypatch.setattr(reporter, "claim", lambda name: True)  # other tests may run beside these
        monkeypatch.setattr(reporter, "MAX_S", 0.0)  # tests/faults/test_reporter.py waits
        excepthook.install(rank, statuses.append, lambda error: "This rank serves.")
        try:
            raise error
        except Exception:
            sys.excepthook(*sys.exc_info())
        return statuses

    return show


def test_every_line_is_labelled_and_the_job_ends(hook, capsys):
    assert hook(3, ValueError("two\nlines")) == [1]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[rank 3] Traceback (most recent call last):"
    assert lines[-3:] == ["[rank 3] ValueError: two", "[rank 3] lines", "[rank 3] This rank serves."]
    assert all(line.startswith("[rank 3] ") for line in lines)


def test_the_users_logging_has_it_too(hook, caplog):
    hook(3, error := ValueError("two\nlines"))
    (record,) = caplog.records
    assert record.getMessage() == "rank 3 ends the job by an uncaught exception."
    assert (record.name, record.levelname, record.exc_info[1]) == ("hpcdist", "ERROR", error)


def test_errors_of_hpcdist_are_one_line_with_its_place_in_the_script(hook, capsys):
    assert hook(3, ConfigError("lr must be greater than 0")) == [1]
    place = rf"\({re.escape(__file__)}:\d+\)"
    shown = capsys.readouterr().err
    assert re.fullmatch(rf"\[rank 3\] hpcdist: error: lr must be greater than 0 {place}\n", shown), shown


def test_errors_of_communication_keep_their_traceback(hook, capsys):
    hook(3, DeadlineError("rank 0 did not answer"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[rank 3] Traceback (most recent call last):"
    assert lines[-1] == "[rank 3] hpcdist.errors.DeadlineError: rank 0 did not answer"


def test_a_process_alone_ends_by_itself_with_its_own_tracebacks(hook, capsys, monkeypatch):
    monkeypatch.setattr(excepthook, "is_reporter", lambda rank: False)  # others of the same shell may fail beside it
    assert hook(None, ConfigError("lr must be greater than 0")) == []
    assert capsys.readouterr().err.startswith("hpcdist: error: lr must be greater than 0 (")
    assert hook(None, ValueError("x")) == []
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):") and shown.endswith(
        "\nValueError: x\nThis rank serves.\n"
    )


def test_another_install_takes_the_place_of_the_first(monkeypatch, capsys):
    monkeypatch.setattr(reporter, "claim", lambda name: True)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    statuses: list[tuple[str, int]] = []
    excepthook.install(1, lambda status: statuses.append(("first", status)))
    excepthook.install(0, lambda status: statuses.append(("second", status)))
    sys.excepthook(ValueError, ValueError("x"), None)
    assert statuses == [("second", 1)] and capsys.readouterr().err == "[rank 0] ValueError: x\n"


def test_causes_are_shown(hook, capsys):
    error = RuntimeError("outer")
    error.__cause__ = KeyError("inner")
    hook(0, error)
    shown = capsys.readouterr().err
    assert "KeyError: 'inner'" in shown and "direct cause" in shown and "RuntimeError: outer" in shown


def test_a_hook_that_was_there_is_called_first(monkeypatch, capsys):
    order = []
    monkeypatch.setattr(reporter, "claim", lambda name: True)
    monkeypatch.setattr(sys, "excepthook", lambda *args: order.append(args[0]))
    excepthook.install(0, lambda status: order.append(status))
    sys.excepthook(ValueError, ValueError("x"), None)
    assert order == [ValueError, 1]
    assert "[rank 0] ValueError: x" in capsys.readouterr().err


def test_torchs_hook_around_it_does_not_swallow_it(hook, monkeypatch, capfd):
    """torch.distributed's collects what the hook before it writes, to label it once that returns: it never does."""
    collected = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", collected)
        assert hook(3, ValueError("x")) == [1]
    assert "[rank 3] ValueError: x" in capfd.readouterr().err
