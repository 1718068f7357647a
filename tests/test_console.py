"""What is shown: progress, tables and descriptions, whatever the terminal."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdist.tools import console
from hpcdist.tools.console import ProgressMode
from hpcdist.train import Progress


def progress(samples: int = 500, epochs: int = 4, **changes) -> Progress:
    given = {"epoch": 0, "epoch_samples": 250, "seconds": 2.0, "loss": 0.5}
    given["metrics"] = {"accuracy": 0.98765, "loss": 0.4}
    return Progress(samples=samples, epochs=epochs, total_samples=1000, **given | changes)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_where_progress_is_live(monkeypatch):
    for mode, size, terminal, live in (
        ("auto", 1, True, True),
        ("auto", 1, False, False),
        ("auto", 4, True, False),  # a launcher's terminal may end in a file
        ("live", 4, False, True),
        ("lines", 1, True, False),
    ):
        monkeypatch.setattr(sys, "stdout", shown := Terminal() if terminal else io.StringIO())
        console.progress(ProgressMode(mode), size)("gossip_pull", progress())
        assert shown.getvalue().startswith("\r\x1b[2Kgossip_pull") == live, mode
        assert shown.getvalue().endswith("\n") != live, mode
    assert console.progress(ProgressMode.off, 1) is None


def test_a_live_line_ends_with_the_last_evaluation(capsys):
    """Not with the last sample, after which the evaluation is still to come."""
    show = console.progress(ProgressMode.live, 1)
    show("allreduce", progress(1000, epoch=3))
    assert not capsys.readouterr().out.endswith("\n")
    show("allreduce", progress(1000, epoch=4, ended=True))
    assert capsys.readouterr().out.endswith("\n")


@given(
    columns=st.integers(1, 250),
    samples=st.integers(0, 1000),
    loss=st.none() | st.floats(allow_nan=True),
    name=st.sampled_from(["allreduce", "parameter_server", "a_strategy_with_a_long_name"]),
)
def test_a_live_line_never_wraps(columns, samples, loss, name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(sys, "stdout", shown := io.StringIO())
        console.progress(ProgressMode.live, 1)(name, progress(samples, loss=loss))
    assert len(shown.getvalue().removeprefix("\r\x1b[2K")) < columns or columns == 1


@pytest.mark.parametrize(("encoding", "bar"), [("utf-8", "██████"), ("iso-8859-1", "######"), ("ascii", "######")])
def test_the_bar_suits_the_encoding(monkeypatch, encoding, bar):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stdout", shown := io.TextIOWrapper(io.BytesIO(), encoding))
    console.progress(ProgressMode.live, 1)("allreduce", progress(500))
    shown.seek(0)
    text = shown.read()
    assert text.count(bar[0]) == 12 and text.count("░" if bar[0] == "█" else ".") >= 12


def test_lines_have_the_epoch_that_is_under_way_or_has_just_ended(capsys):
    """Before the first figures a server has no loss of its own, and nothing has been evaluated or timed yet."""
    show = console.progress(ProgressMode.lines, 4)
    show("parameter_server", progress(0, seconds=0.0, loss=None, metrics={}))
    assert capsys.readouterr().out == "parameter_server   0%  epoch 1/4\n"
    for samples, epoch in ((0, 1), (1, 1), (250, 1), (251, 2), (750, 3), (1000, 4)):
        show("allreduce", progress(samples))
        assert f"epoch {epoch}/4" in capsys.readouterr().out


def test_errors_and_notes_go_to_standard_error(capsys):
    console.error("it must be so; got otherwise.")
    console.note("all is well")
    assert capsys.readouterr() == ("", "hpcdist: error: it must be so; got otherwise.\nhpcdist: all is well\n")


def test_durations_and_bytes():
    assert list(map(console.duration, (5.4, 200, 7500))) == ["5 s", "3 min 20 s", "2 h 05 min"]
    assert list(map(console.amount, (999, 12345, 2.5e6, 3e9, 4e13))) == ["999 B", "12.3 kB", "2.5 MB", "3 GB", "40 TB"]


def test_rows_of_measurements(capsys):
    """Numbers to the right with 4 digits, text to the left, nothing for what was not measured."""
    found = [{"name": "ring", "bytes": 4096, "median_s": 1.23456e-5}, {"name": "a[b]", "bytes": None, "median_s": 2.0}]
    console.rows("all-reduce", found)
    title, heading, _, first, second = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert (title, heading.split()) == ("all-reduce", ["name", "bytes", "median_s"])
    assert (first.split(), second.split()) == (["ring", "4096", "1.235e-05"], ["a[b]", "2"])


def test_facts_are_nested(capsys):
    console.facts({"path": Path("a.h5"), "splits": {"train": {"samples": 3}}, "notes": {}})
    assert capsys.readouterr().out == "path: a.h5\nsplits:\n  train:\n    samples: 3\nnotes: {}\n"


def test_control_characters_of_files_are_shown_as_text(capsys):
    console.note("a\x1b[31mb\tc\nd")
    console.facts({"k\x07": {"x": "\x9b2J"}, "\u202ey": 1})
    console.rows("r", [{"s\x1b": "v\x1b[1m"}])
    console.finding("ok", "mpi", "\x1b]8;;http://x\x1b\\")
    out, err = capsys.readouterr()
    assert err == "hpcdist: a\\x1b[31mb\tc\nd\n"
    assert out.replace("\n", "").isprintable() and r"v\x1b[1m" in out and r"\u202ey: 1" in out and r"x: \x9b2J" in out
