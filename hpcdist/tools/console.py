"""Output of the command line: progress, tables and texts on standard output; errors and notes on standard error."""

from __future__ import annotations

import enum
import inspect
import os
import re
import shutil
import stat
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hpcdist import log

if TYPE_CHECKING:  # their modules import torch, which takes seconds
    from hpcdist.config.settings import Option
    from hpcdist.records import Summary
    from hpcdist.train import Progress

T = TypeVar("T")
TEXT_COLUMNS = 100  # longer lines are hard to read
MIN_BAR = 8  # columns; figures are dropped to leave at least this many
DROPPED_FIRST = ("rate", "step", "epoch", "time")  # dropped first on a narrow terminal, in this order
MIN_TEXT = 20  # columns of a text in a table, at least
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: Any) -> str:
    """Escape control characters except line ends and tabs: text from a file could otherwise control the terminal."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], str(text))


def error(message: str) -> None:
    """Print an error, independent of the library's logging (hpcdist/log.py)."""
    note(f"error: {message}")


def note(message: str) -> None:
    """Print a message for the user of a command."""
    log.write(f"hpcdist: {visible(message)}\n")


def duration(seconds: float) -> str:
    """Format a time: 42 s, 3 min 20 s, 2 h 05 min, 3 d 4 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def amount(n_bytes: float) -> str:
    """Format a number of bytes with three digits: 12.3 kB."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 999.5:  # 1000 with three digits
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} TB"


def count(number: int, noun: str) -> str:
    """Format a number of things: `1 rank`, `4 ranks`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def bar(fraction: float, width: int, *, ascii_only: bool) -> str:
    """Draw a progress bar of `width` characters."""
    full, rest = "#." if ascii_only else "█░"
    done = round(min(fraction, 1.0) * width)
    return full * done + rest * (width - done)


def shortened(text: str, width: int, *, ascii_only: bool) -> str:
    """Replace the middle of a text by an ellipsis if it is longer than `width`."""
    dots = "..." if ascii_only else "…"
    n_kept = max(0, width - len(dots))
    return text if len(text) <= width else text[: -(-n_kept // 2)] + dots + text[len(text) - n_kept // 2 :]


# --- progress ---------------------------------------------------------------------------------------------------------
class ProgressMode(str, enum.Enum):
    auto = "auto"
    live = "live"
    lines = "lines"
    off = "off"


def progress(mode: ProgressMode, in_notebook: bool = False) -> Callable[[str, Progress], None] | None:
    """Return a function that shows a run's progress: on one rewritten line (live), a line per report, or None (off).

    `auto` is live on a terminal, also through Open MPI's mpirun, and `in_notebook`. MPICH's and Slurm's launchers
    connect ranks to a pipe even on a terminal: lines.
    """
    if mode is ProgressMode.off:
        return None
    is_live = mode is ProgressMode.live or (
        mode is ProgressMode.auto and (_is_terminal() or (in_notebook and not _is_file()))
    )
    return _show_live if is_live else _show_line


def _show_line(name: str, now: Progress) -> None:
    print("  ".join([f"{name:<16} {_share(now)}", *_progress_parts(now).values()]), flush=True)


def _show_live(name: str, now: Progress) -> None:
    """Overwrite the current line, without escape codes, which files and some terminals don't understand.

    Not `rich.progress`: it hides the cursor, which an aborted job never restores, and fails on ASCII-only terminals.
    """
    columns = shutil.get_terminal_size().columns - 1  # writing the last column may start a new line
    parts = {"share": _share(now), **_progress_parts(now)}
    while len("  ".join([name, *parts.values()])) + 1 + MIN_BAR > columns and len(parts) > 1:
        parts.pop(next(key for key in (*DROPPED_FIRST, *reversed(parts)) if key in parts))
    figures = list(parts.values())
    ascii_only = "utf" not in (sys.stdout.encoding or "").lower()
    width = max(0, columns - len("  ".join([name, *figures])) - 1)
    done = bar(now.samples / now.total_samples, width, ascii_only=ascii_only)
    line = f"{name} {done} {'  '.join(figures)}"[: max(0, columns)]
    print(f"\r{line:<{max(0, columns)}}", end="\n" if now.ended else "", flush=True)
    log.line_is_open = not now.ended


def _share(now: Progress) -> str:
    return f"{now.samples / now.total_samples:4.0%}"


def _progress_parts(now: Progress) -> dict[str, str]:
    """Return what a progress line shows, in order; the keys are those of DROPPED_FIRST, `loss` and `of METRIC`."""
    epoch = max(1, -(-now.samples // now.epoch_samples))  # current epoch, or the one that has just ended
    remaining = "" if now.left_s is None else f", {duration(now.left_s)} left"
    parts = {"epoch": f"epoch {epoch}" if now.epochs is None else f"epoch {epoch:>{len(str(now.epochs))}}/{now.epochs}"}
    parts |= {"time": f"{duration(now.seconds)}{remaining}"} if now.seconds > 0 else {}
    parts |= {f"of {name}": f"test {name} {value:.4f}" for name, value in now.metrics.items() if name != "loss"}
    parts |= {} if now.loss is None else {"loss": f"loss {now.loss:.4f}"}
    parts |= {"step": f"step {now.step:,}"} if now.step else {}
    parts |= {"rate": f"{now.samples / now.seconds:,.0f} samples/s"} if now.seconds > 0 else {}
    return parts


# --- runs -------------------------------------------------------------------------------------------------------------
def result(folder: Path, summary: Summary) -> None:
    """Print one line about a finished run."""
    metrics = ", ".join(f"test {name} {value:.4f}" for name, value in summary.metrics.items())
    ranks = count(summary.ranks, "rank")
    if summary.stages > 1:
        replicas = summary.ranks // summary.stages
        bubble = sum(summary.bubbles) / summary.stages
        ranks += f" ({replicas} x {summary.stages} stages, {bubble:.0%} of their time in the bubble)"
    lost = f", continued without rank {', '.join(map(str, summary.lost_ranks))}" if summary.lost_ranks else ""
    skipped = f", {summary.skipped} steps skipped for NaN or infinite gradients" if summary.skipped else ""
    joules = "" if summary.energy.joules is None else f", {summary.energy.joules:.4g} J"
    cost = f"{summary.wall_s:.1f} s{joules}{skipped}"
    print(visible(f"{summary.strategy} on {ranks}{lost}: {metrics}, {cost}; records in {folder}"), flush=True)


# --- tables -----------------------------------------------------------------------------------------------------------
def rows(
    title: str | None,
    data: Sequence[Mapping[str, Any]],
    *,
    heads: Mapping[str, str] | None = None,
    left_aligned: Sequence[str] | None = None,
    whole: Collection[str] = (),
    option: str | None = None,
) -> None:
    """Print rows as a table, with one column per key of the first row.

    On a terminal long texts wrap, and columns without room are dropped and listed below. In a file rows don't wrap.

    Args:
        heads: column heads, if they differ from the keys.
        left_aligned: left-aligned columns, with texts; None: those with a str in the first row.
        whole: columns of names that users may type again: they are not broken.
        option: the command's option that chooses columns, to mention it when columns are dropped.
    """
    heads = {key: visible((heads or {}).get(key, key)) for key in data[0]}
    texts = {key: [visible(_figure(row.get(key))) for row in data] for key in data[0]}
    if left_aligned is None:
        left_aligned = [key for key, value in data[0].items() if isinstance(value, str)]
    columns = shutil.get_terminal_size().columns if _is_terminal() else None
    widths = dict.fromkeys(texts, sys.maxsize) if columns is None else _fit(heads, texts, left_aligned, whole, columns)
    cells = {key: [_wrap(text, widths[key]) if key in left_aligned else text for text in texts[key]] for key in widths}
    widths = {key: max(map(_width, [heads[key], *groups])) for key, groups in cells.items()}
    if title is not None:
        line(title)
    head = _lines([heads[key] for key in widths], widths, left_aligned, above=True)
    body = [text for row in zip(*cells.values()) for text in _lines(row, widths, left_aligned)]
    print("\n".join(["", *head, " " + "─" * (sum(widths.values()) + len(widths) - 1), *body, ""]), flush=True)
    if dropped := [key for key in texts if key not in widths]:
        choice = f"{option} {next(iter(widths))},{dropped[0]},... chooses columns; " if option else ""
        line(f"No room for {', '.join(dropped)}: {choice}a wider terminal or a file shows all.")
        print(flush=True)


def _fit(
    heads: Mapping[str, str],
    texts: Mapping[str, Sequence[str]],
    left_aligned: Sequence[str],
    whole: Collection[str],
    columns: int,
) -> dict[str, int]:
    """Return the width of each column that fits into `columns` of a terminal, in order.

    Text columns (`left_aligned`) may wrap, in `whole` between words only; they get a quarter of the terminal or more.
    """
    widths: dict[str, int] = {}
    full_widths: dict[str, int] = {}
    room = columns - 1
    for key, column in texts.items():
        full_widths[key] = width = max(map(_width, (heads[key], *column)))
        if key in left_aligned:
            words = [word for text in column for word in text.split()] if key in whole else []
            width = min(width, max(MIN_TEXT, columns // 4, *map(_width, words)))
        if width < room or not widths:
            widths[key] = width
            room -= 1 + width
    for key in widths:
        extra = min(full_widths[key] - widths[key], max(0, room))
        widths[key] += extra
        room -= extra
    return widths


def _width(text: str) -> int:
    """Return the number of terminal columns of a text, of its longest line."""
    if text.isascii() and "\n" not in text:
        return len(text)
    from rich.cells import cell_len

    return max(map(cell_len, text.split("\n")))


def _lines(
    groups: Sequence[str], widths: Mapping[str, int], left_aligned: Sequence[str], *, above: bool = False
) -> list[str]:
    """Format a table's row as lines; `groups` are its cells, and shorter ones get empty lines below, or `above`."""
    parts = [group.split("\n") for group in groups]
    height = max(map(len, parts))
    parts = [[""] * (height - len(part)) + part if above else part + [""] * (height - len(part)) for part in parts]
    lines = []
    for row in zip(*parts):
        padded = [
            text + gap if key in left_aligned else gap + text
            for text, (key, width) in zip(row, widths.items())
            for gap in [" " * (width - _width(text))]
        ]
        lines.append(f" {' '.join(padded)}".rstrip())
    return lines


def _wrap(text: str, width: int) -> str:
    """Wrap a text, if possible only after commas and before brackets, so that `lr 0.1` stays on one line."""
    if len(text) <= width and "\n" not in text:
        return text
    joined = re.sub(r"(?<!,) (?!\()", "\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(joined, width, break_on_hyphens=False, break_long_words=False)
    if any(len(line) > width for line in lines):
        lines = textwrap.wrap(text, width, break_on_hyphens=False)
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _is_terminal() -> bool:
    """Return whether standard output is a terminal with a size; Open MPI's mpirun gives ranks one without."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns > 0
    except (OSError, ValueError):
        return False


def _is_file() -> bool:
    with suppress(OSError, ValueError):
        return stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
    return True


def line(text: str, before: str = "") -> None:
    """Print a text after the prefix `before`: wrapped on a terminal, on one line in a file."""
    if _is_terminal():
        _print_text(visible(text), before, len(before))
    else:
        print(visible(before + text), flush=True)


# --- descriptions -----------------------------------------------------------------------------------------------------
def overview(algorithms: Mapping[str, Any]) -> None:
    """Print each name with the first sentence of its docstring."""
    width = max(map(len, algorithms))
    for name, algorithm in algorithms.items():
        sentence = re.split(r"(?<=\.)\s|\n\n", inspect.getdoc(algorithm) or "", maxsplit=1)[0]
        _print_text(sentence, f"{name:<{width}}  ", width + 2)


def algorithm(
    name: str,
    cls: Any,
    options: Sequence[Option] = (),
    examples: Sequence[str] = (),
    *,
    more: str = "",
    set_by: str = "--set KEY=VALUE",
) -> None:
    """Print an algorithm's docstring, options, reference and example commands."""
    head, _, reference = (inspect.getdoc(cls) or "").partition("Reference:")
    print(name)
    for paragraph in head.strip().split("\n\n"):
        if not re.match(r"\w+:\n", paragraph):  # Args, Raises...
            _print_text(paragraph)
    if more:
        _print_text(more)
    if options:
        print(f"\n    Options, each set by {set_by}:")
    for option in options:
        described = (option.type, option.rule, f"default {option.default}" if option.default else "required")
        _print_text(f"{option.key} ({', '.join(filter(None, described))}): {option.description}", hanging=8)
    if reference:
        print()
        _print_text(f"Reference: {reference}", hanging=8)
    if examples:
        print("\n    Example:")
    for command in examples:
        unbroken = command.replace("--set ", "--set\N{NO-BREAK SPACE}")
        lines = textwrap.wrap(unbroken, columns() - 12, break_on_hyphens=False, break_long_words=False)
        print("        " + " \\\n            ".join(lines).replace("\N{NO-BREAK SPACE}", " "))
    print()


def _print_text(text: str, before: str = " " * 4, hanging: int = 4) -> None:
    wrapper = textwrap.TextWrapper(columns(), before, " " * hanging, break_on_hyphens=False)
    print(wrapper.fill(" ".join(text.split())))


def columns() -> int:
    """Return the width for text: the terminal's, up to TEXT_COLUMNS."""
    return min(TEXT_COLUMNS, shutil.get_terminal_size((TEXT_COLUMNS, 24)).columns)


def facts(mapping: Mapping[str, Any], indent: int = 0) -> None:
    """Print a nested mapping, one line per entry."""
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            print(f"{'  ' * indent}{visible(key)}:")
            facts(value, indent + 1)
        else:
            print(f"{'  ' * indent}{visible(f'{key}: {value}')}")


# --- progress bars ----------------------------------------------------------------------------------------------------
def tracked(items: Sequence[T], title: str) -> Iterator[T]:
    """Yield all items, with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    yield from track(items, title, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


@contextmanager
def downloads() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a progress bar per downloaded file on a terminal; yield the function to call for each block."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    bars: dict[str, Any] = {}
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:

        def show(file: str, n_bytes: int, total: int | None) -> None:
            if file not in bars:
                bars[file] = progress.add_task(file)
            progress.update(bars[file], completed=n_bytes, total=total)

        yield show
