"""What is shown: progress, tables and descriptions, whatever the terminal."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cases import each
from harness.launch import IMPORTS, find_mpirun
from hpcdist import log
from hpcdist.tools import console
from hpcdist.tools.console import ProgressMode
from hpcdist.train import Progress


def progress(samples: int = 500, epochs: int = 4, **changes) -> Progress:
    given = {"epoch": 0, "epoch_samples": 250, "step": samples // 10, "seconds": 20.0, "loss": 0.5}
    given["metrics"] = {"accuracy": 0.98765, "loss": 0.4}
    return Progress(samples=samples, epochs=epochs, total_samples=1000, **given | changes)


@pytest.fixture(autouse=True)
def no_line_is_open(monkeypatch):
    monkeypatch.setattr(log, "line_is_open", False)


@contextmanager
def terminal(columns: int, stream: str = "stdout") -> Iterator[int]:
    """A terminal of that width, to which standard output goes; its other side. Open MPI gives one without a width."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 0, columns, 0, 0))
    with pytest.MonkeyPatch.context() as patch, open(theirs, "w", encoding="utf-8") as shown:
        patch.setattr(sys, stream, shown)
        patch.setenv("COLUMNS", str(columns))  # the process has none of its own
        yield ours
    os.close(ours)


def shown_by(terminal: int) -> str:
    """All that has been written to it."""
    os.set_blocking(terminal, False)
    parts = []
    with suppress(BlockingIOError):
        while True:
            parts.append(os.read(terminal, 1 << 14))
    return b"".join(parts).decode().replace("\r\n", "\n")


def test_where_progress_is_live(monkeypatch, capsys):
    for mode, columns, live in (("auto", 90, True), ("auto", 0, False), ("live", 0, True), ("lines", 90, False)):
        with terminal(columns) as shown:
            console.progress(ProgressMode(mode))("gossip_pull", progress())
            text = os.read(shown, 1000).decode()
        assert text.startswith("\rgossip_pull ") == live and text.endswith("\n") != live, (mode, columns)
        assert "\x1b" not in text
    for mode, live in (("auto", False), ("live", True)):  # to a file
        console.progress(ProgressMode(mode))("gossip_pull", progress())
        assert capsys.readouterr().out.startswith("\r") == live
    assert console.progress(ProgressMode.off) is None


SHOW = """
from types import SimpleNamespace
from hpcdist.tools.console import ProgressMode, progress
now = {"samples": 1, "total_samples": 2, "epoch_samples": 2, "epochs": 1, "step": 7, "seconds": 0, "left_s": None}
progress(ProgressMode.auto)("allreduce", SimpleNamespace(**now, metrics={}, loss=None, ended=True))
"""


@pytest.mark.skipif(find_mpirun() is None, reason="no mpirun beside this Python or on PATH")
def test_a_launcher_shows_a_live_line_on_a_terminal_only(tmp_path):
    """Open MPI gives each rank a terminal, also where its own output goes to a file."""
    if "Open MPI" not in subprocess.run([find_mpirun(), "--version"], capture_output=True, text=True).stdout:
        pytest.skip("only Open MPI gives ranks a terminal")
    command = [find_mpirun(), "-n", "1", sys.executable, "-c", SHOW]
    with open(tmp_path / "file", "wb") as file:
        subprocess.run(command, stdout=file, stdin=subprocess.DEVNULL, env=os.environ | IMPORTS, check=True, timeout=60)
    assert (tmp_path / "file").read_text() == "allreduce         50%  epoch 1/1  step 7\n"
    with terminal(60) as shown:
        subprocess.run(
            command, stdout=sys.stdout, stdin=subprocess.DEVNULL, env=os.environ | IMPORTS, check=True, timeout=60
        )
        line = os.read(shown, 1000).decode()
    assert line.startswith("\rallreduce ██") and line.split("░ ")[1].strip() == "50%  epoch 1/1  step 7"


def test_in_a_cell_of_a_notebook_one_line_is_rewritten_with_loss_and_accuracy(tmp_path):
    """Jupyter's kernels give commands a variable; `%%bash` reads them by pipes."""
    settings = ["data.path=digits.h5", "epochs=2", "log_every=5", "strategy=gossip_pull"]
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "hpcdist", "train", str(Path(__file__).parent / "train" / "tiny.py"), *words]
    environ = os.environ | IMPORTS | {"JPY_PARENT_PID": "1"}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, check=True)
    *_, last, result, _ = done.stdout.decode().replace("\r", "\n").split("\n")
    assert done.stdout.count(b"\r") > 5 and done.stdout.count(b"\n") == 2 and len(last) == 79
    assert re.search(r"gossip_pull █+ +100%  .*test accuracy 0\.\d{4}  loss \d\.\d{4}", last) and "records in" in result
    with open(tmp_path / "file", "wb") as file:
        subprocess.run(command, env=environ, cwd=tmp_path, stdout=file, check=True)
    assert b"\r" not in (tmp_path / "file").read_bytes()


def test_figures_that_find_no_room_are_left_out_the_least_important_first(capsys, monkeypatch):
    for columns, line in {
        160: " 50%  epoch 2/4  20 s, 20 s left  test accuracy 0.9877  loss 0.5000  step 50  25 samples/s",
        95: " 50%  epoch 2/4  20 s, 20 s left  test accuracy 0.9877  loss 0.5000",
        80: " 50%  20 s, 20 s left  test accuracy 0.9877  loss 0.5000",
        60: " 50%  test accuracy 0.9877  loss 0.5000",
    }.items():
        monkeypatch.setenv("COLUMNS", str(columns))
        console.progress(ProgressMode.live)("allreduce", progress(500))
        found = capsys.readouterr().out
        assert re.sub(r"^\rallreduce █+░+ ", "", found).rstrip() == line, columns


def test_a_live_line_ends_with_the_last_evaluation(capsys):
    """Not with the last sample, after which the evaluation is still to come. A message has a line of its own."""
    show = console.progress(ProgressMode.live)
    show("allreduce", progress(1000, epoch=3))
    assert not capsys.readouterr().out.endswith("\n")
    console.note("one")
    console.error("it must be so; got otherwise.")
    assert capsys.readouterr().err == "\nhpcdist: one\nhpcdist: error: it must be so; got otherwise.\n"
    show("allreduce", progress(1000, epoch=4, ended=True))
    console.note("three")
    out, err = capsys.readouterr()
    assert out.endswith("\n") and err == "hpcdist: three\n"


@settings(max_examples=30)
@given(
    columns=st.integers(1, 250),
    samples=st.integers(0, 1000),
    loss=st.none() | st.floats(allow_nan=True),
    name=st.sampled_from(["allreduce", "parameter_server", "a_strategy_with_a_long_name"]),
)
def test_a_live_line_never_wraps_and_covers_the_former_one(columns, samples, loss, name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(sys, "stdout", shown := io.StringIO())
        console.progress(ProgressMode.live)(name, progress(samples, loss=loss))
    assert len(shown.getvalue().removeprefix("\r")) == columns - 1


def test_the_bar_suits_the_encoding(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    for encoding, bar in (("utf-8", "█░"), ("iso-8859-1", "#."), ("ascii", "#.")):
        monkeypatch.setattr(sys, "stdout", shown := io.TextIOWrapper(io.BytesIO(), encoding))
        console.progress(ProgressMode.live)("allreduce", progress(500))
        shown.seek(0)
        assert set(shown.read().split()[1]) == set(bar)


def test_lines_have_the_epoch_that_is_under_way_or_has_just_ended(capsys):
    """Before the first figures a server has no loss of its own, and nothing has been evaluated or timed yet."""
    show = console.progress(ProgressMode.lines)
    show("parameter_server", progress(0, seconds=0.0, loss=None, metrics={}))
    assert capsys.readouterr().out == "parameter_server   0%  epoch 1/4\n"
    for samples, epoch in ((0, 1), (1, 1), (250, 1), (251, 2), (750, 3), (1000, 4)):
        show("allreduce", progress(samples))
        assert f"epoch {epoch}/4" in capsys.readouterr().out


def test_durations_and_bytes():
    assert list(map(console.duration, (5.4, 200, 7500))) == ["5 s", "3 min 20 s", "2 h 05 min"]
    assert list(map(console.amount, (999, 12345, 2.5e6, 3e9, 4e13))) == ["999 B", "12.3 kB", "2.5 MB", "3 GB", "40 TB"]
    assert list(map(console.amount, (999.4, 999.6, 999_600))) == ["999 B", "1 kB", "1 MB"], "rounded to three digits"


FIGURES = {"accuracy": "0.9722 ± 0.0031", "seconds": 12.5}
MEASURED = [
    {"name": f"softsync (splits {splits}, compression topk)", **FIGURES, "bytes": n}
    for splits, n in ((1, "308 kB"), (4, "61 kB"))
]


@each("case", [(30, ["accuracy", "bytes"]), (40, ["seconds", "bytes"]), (50, ["bytes"]), (60, [])])
def test_a_table_fits_its_terminal_and_says_what_has_no_room(case, monkeypatch):
    """Numbers are whole, or their column is left out: the last ones, unless they fit beside those before them."""
    columns, skipped = case
    monkeypatch.setenv("TERM", "dumb")
    with terminal(columns) as shown:
        console.rows(
            "four columns", MEASURED, heads={"bytes": "bytes\n/step"}, left_aligned=["name"], option="--columns"
        )
        text = shown_by(shown)
    assert max(map(len, text.splitlines())) <= columns
    assert "(splits 4," in text and "compression topk)" in text, "texts go on in the next line behind a comma"
    for column, figures in (("accuracy", "0.9722 ± 0.0031"), ("seconds", "12.5"), ("bytes", "308 kB")):
        assert (figures in text) == (column not in skipped)
    said = f"No room for {', '.join(skipped)}: --columns name,{','.join(skipped[:1])},... chooses columns; a wider"
    assert (f"{said} terminal or a file shows all." in " ".join(text.split())) == bool(skipped)


def test_a_table_in_a_file_has_all_columns_and_a_line_for_each_row(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    console.rows("wide", [{f"column {i}": "x" * 40 for i in range(20)}])
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].count("x") == 800 and all(line == line.rstrip() and line.isprintable() for line in lines)


def test_what_takes_a_while_shows_how_far_it_is_on_a_terminal_only(capsys, monkeypatch):
    assert list(console.tracked([1, 2], "reading")) == [1, 2] and capsys.readouterr() == ("", "")
    monkeypatch.setenv("TERM", "xterm")
    with terminal(60, "stderr") as shown:
        assert list(console.tracked([1, 2], "reading")) == [1, 2]
        assert "reading" in shown_by(shown)


def test_facts_are_nested(capsys):
    console.facts({"path": Path("a.h5"), "splits": {"train": {"samples": 3}}, "notes": {}})
    assert capsys.readouterr().out == "path: a.h5\nsplits:\n  train:\n    samples: 3\nnotes: {}\n"


def test_control_characters_of_files_are_shown_as_text(capsys):
    console.note("a\x1b[31mb\tc\nd")
    console.facts({"k\x07": {"x": "\x9b2J"}, "\u202ey": 1})
    console.rows("r", [{"s\x1b": "v\x1b[1m", "name": "a[b]", "none": None}])
    console.line("\x1b]8;;http://x\x1b\\", "ok       mpi       ")
    out, err = capsys.readouterr()
    assert err == "hpcdist: a\\x1b[31mb\tc\nd\n"
    assert out.replace("\n", "").isprintable() and r"v\x1b[1m" in out and "a[b]" in out and "None" not in out
    assert r"\u202ey: 1" in out and r"x: \x9b2J" in out


def test_a_finding_of_the_doctor_is_wrapped_on_a_terminal_only(monkeypatch, capsys):
    text = "n3 is slow: to n2 138 µs, 47.8 Mbit/s; the nodes' median is 138 µs. Exclude it (--exclude=n3-a-long-name)"
    console.line(text, "warning  links     ")
    assert capsys.readouterr().out == f"warning  links     {text}\n", "in a file, a line that grep finds"
    monkeypatch.setattr(console, "_is_terminal", lambda: True)
    for columns in (60, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        console.line(text, "warning  links     ")
        first, *others = capsys.readouterr().out.splitlines()
        assert all(len(line) <= columns for line in (first, *others)) and first.startswith("warning  links     n3 is ")
        assert all(line.startswith(" " * 19) for line in others)
        assert " ".join([first[19:], *(line.strip() for line in others)]) == text, "no word is broken"
