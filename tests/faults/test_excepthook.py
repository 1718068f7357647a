"""Exceptions that nobody catches."""

from __future__ import annotations

import io
import sys

import pytest

from hpcdist.errors import ConfigError
from hpcdist.faults import excepthook, turns


@pytest.fixture
def hook(monkeypatch):
    """Installs the hook for a rank and shows it an exception; the exit statuses that it asked for."""

    def show(rank: int, error: Exception) -> list[int]:
        statuses: list[int] = []
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        monkeypatch.setattr(turns, "claim", lambda name: True)  # other tests may run beside these
        monkeypatch.setattr(turns, "MOST_S", 0.0)  # tests/faults/test_turns.py waits
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


def test_errors_of_hpcdist_say_themselves_what_to_do(hook, capsys):
    hook(3, ConfigError("lr must be greater than 0"))
    assert capsys.readouterr().err.splitlines()[-1] == "[rank 3] hpcdist.errors.ConfigError: lr must be greater than 0"


def test_causes_are_shown(hook, capsys):
    error = RuntimeError("outer")
    error.__cause__ = KeyError("inner")
    hook(0, error)
    shown = capsys.readouterr().err
    assert "KeyError: 'inner'" in shown and "direct cause" in shown and "RuntimeError: outer" in shown


def test_a_hook_that_was_there_is_called_first(monkeypatch, capsys):
    order = []
    monkeypatch.setattr(turns, "claim", lambda name: True)
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
