"""Show progress, tables, errors of the command line: results on standard output, all else on standard error."""

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

if TYPE_CHECKING:  # they import torch, which takes seconds
    from hpcdist.config import Option
    from hpcdist.records import Summary
    from hpcdist.topology import Topology
    from hpcdist.train import Progress

T = TypeVar("T")
TEXT_COLUMNS = 100  # longer lines are hard to read
LEAST_BAR = 8  # columns; figures that leave it fewer are left out
LEFT_OUT = ("rate", "step", "epoch", "time")  # figures that a narrow terminal leaves out first, in this order
LEAST_TEXT = 20  # columns of a terminal for texts in a table
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: Any) -> str:
    """Write control characters, but for line ends and tabs, as text: a file may be made to change the terminal."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], str(text))


def error(message: str) -> None:
    """Show an error, whatever becomes of the library's own messages (hpcdist/log.py)."""
    note(f"error: {message}")


def note(message: str) -> None:
    """Show what the user of a command should know."""
    log.write(f"hpcdist: {visible(message)}\n")


def duration(seconds: float) -> str:
    """Write a time as people say it: 42 s, 3 min 20 s, 2 h 05 min, 3 d 4 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def amount(n_bytes: float) -> str:
    """Write a number of bytes with three digits: 12.3 kB."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} TB"


def bar(fraction: float, width: int, *, ascii_only: bool) -> str:
    """Draw the part of something that is done in `width` characters."""
    full, rest = "#." if ascii_only else "█░"
    done = round(min(fraction, 1.0) * width)
    return full * done + rest * (width - done)


def shortened(text: str, width: int, *, ascii_only: bool) -> str:
    """Put an ellipsis in the place of the middle of a text that is longer than `width`."""
    dots = "..." if ascii_only else "…"
    kept = max(0, width - len(dots))
    return text if len(text) <= width else text[: -(-kept // 2)] + dots + text[len(text) - kept // 2 :]


# --- progress ---------------------------------------------------------------------------------------------------------
class ProgressMode(str, enum.Enum):
    auto = "auto"
    live = "live"
    lines = "lines"
    off = "off"


def progress(mode: ProgressMode, in_notebook: bool = False) -> Callable[[str, Progress], None] | None:
    """Return what shows a run's progress: one line that is rewritten (live), a line per report, or nothing.

    `auto` is live where a terminal shows it, also through Open MPI's launcher, and `in_notebook`, whose cells read a
    pipe. MPICH's and Slurm's launchers give ranks a pipe, whatever becomes of their own output: lines.
    """
    if mode is ProgressMode.off:
        return None
    is_live = mode is ProgressMode.live or (
        mode is ProgressMode.auto and (_is_shown() or (in_notebook and not _is_file()))
    )
    return _show_live if is_live else _show_line


def _show_line(name: str, now: Progress) -> None:
    print("  ".join([f"{name:<16} {_share(now)}", *_figures(now).values()]), flush=True)


def _show_live(name: str, now: Progress) -> None:
    """Write the line anew, over the former one, without codes of terminals: some files, and readers, know none.

    By hand: `rich.progress` hides the cursor, which a job that is aborted never gives back; and where a terminal has
    ASCII only, it fails on its own ellipsis.
    """
    columns = shutil.get_terminal_size().columns - 1  # writing the last one may begin a new line
    parts = {"share": _share(now), **_figures(now)}
    while len("  ".join([name, *parts.values()])) + 1 + LEAST_BAR > columns and len(parts) > 1:
        parts.pop(next(key for key in (*LEFT_OUT, *reversed(parts)) if key in parts))
    figures = list(parts.values())
    ascii_only = "utf" not in (sys.stdout.encoding or "").lower()
    width = max(0, columns - len("  ".join([name, *figures])) - 1)
    done = bar(now.samples / now.total_samples, width, ascii_only=ascii_only)
    line = f"{name} {done} {'  '.join(figures)}"[: max(0, columns)]
    print(f"\r{line:<{max(0, columns)}}", end="\n" if now.ended else "", flush=True)
    log.line_is_open = not now.ended


def _share(now: Progress) -> str:
    return f"{now.samples / now.total_samples:4.0%}"


def _figures(now: Progress) -> dict[str, str]:
    epoch = max(1, -(-now.samples // now.epoch_samples))  # the one under way, or that has just ended
    left = "" if now.left_s is None else f", {duration(now.left_s)} left"
    parts = {"epoch": f"epoch {epoch}" if now.epochs is None else f"epoch {epoch:>{len(str(now.epochs))}}/{now.epochs}"}
    parts |= {"time": f"{duration(now.seconds)}{left}"} if now.seconds > 0 else {}
    parts |= {f"of {name}": f"test {name} {value:.4f}" for name, value in now.metrics.items() if name != "loss"}
    parts |= {} if now.loss is None else {"loss": f"loss {now.loss:.4f}"}
    parts |= {"step": f"step {now.step:,}"} if now.step else {}
    parts |= {"rate": f"{now.samples / now.seconds:,.0f} samples/s"} if now.seconds > 0 else {}
    return parts


# --- runs -------------------------------------------------------------------------------------------------------------
def result(folder: Path, summary: Summary) -> None:
    """Show in one line how a run ended."""
    metrics = ", ".join(f"test {name} {value:.4f}" for name, value in summary.metrics.items())
    ranks = f"{summary.ranks} rank{'s' * (summary.ranks > 1)}"
    if summary.stages > 1:
        replicas = summary.ranks // summary.stages
        bubble = sum(summary.bubbles) / summary.stages
        ranks += f" ({replicas} x {summary.stages} stages, {bubble:.0%} of their time in the bubble)"
    lost = f", went on without rank {', '.join(map(str, summary.lost_ranks))}" if summary.lost_ranks else ""
    skipped = f", {summary.skipped} steps skipped for NaN or infinite gradients" if summary.skipped else ""
    joules = "" if summary.energy.joules is None else f", {summary.energy.joules:.4g} J"
    cost = f"{summary.wall_s:.1f} s{joules}{skipped}"
    print(visible(f"{summary.strategy} on {ranks}{lost}: {metrics}, {cost}; records in {folder}"), flush=True)


# --- tables -----------------------------------------------------------------------------------------------------------
def rows(
    title: str | None,
    found: Sequence[Mapping[str, Any]],
    *,
    heads: Mapping[str, str] | None = None,
    left: Sequence[str] | None = None,
    typed: Collection[str] = (),
    option: str | None = None,
) -> None:
    """Show measurements as a table: one column per key of the first row.

    Numbers stay whole, texts may go on in the next line. Where a terminal is too narrow for all columns, the first ones
    are shown, and a line says which are not. Elsewhere, as in a file, a row is one line, however long.

    Args:
        heads: what stands above the columns, if that is not the key.
        left: the columns with texts; None: those that begin with one.
        typed: columns of texts, such as names, that users type again: no word goes on in the next line.
        option: of the command, which chooses columns, for that line.
    """
    heads = {key: visible((heads or {}).get(key, key)) for key in found[0]}
    texts = {key: [visible(_figure(row.get(key))) for row in found] for key in found[0]}
    if left is None:
        left = [key for key, value in found[0].items() if isinstance(value, str)]
    columns = shutil.get_terminal_size().columns if _is_shown() else None
    widths = dict.fromkeys(texts, sys.maxsize) if columns is None else _fitting(heads, texts, left, typed, columns)
    shown = {key: [_folded(text, widths[key]) if key in left else text for text in texts[key]] for key in widths}
    widths = {key: max(map(_width, [heads[key], *groups])) for key, groups in shown.items()}
    if title is not None:
        line(title)
    head = _lines([heads[key] for key in widths], widths, left, above=True)
    body = [text for row in zip(*shown.values()) for text in _lines(row, widths, left)]
    print("\n".join(["", *head, " " + "─" * (sum(widths.values()) + len(widths) - 1), *body, ""]), flush=True)
    if dropped := [key for key in texts if key not in widths]:
        choice = f"{option} {next(iter(widths))},{dropped[0]},... chooses columns; " if option else ""
        line(f"No room for {', '.join(dropped)}: {choice}a wider terminal or a file shows all.")
        print(flush=True)


def _fitting(
    heads: Mapping[str, str],
    texts: Mapping[str, Sequence[str]],
    left: Sequence[str],
    typed: Collection[str],
    columns: int,
) -> dict[str, int]:
    """Return the columns for which there is room, the first ones first, with their widths.

    A text can do with a quarter of the room, and takes what is left over.
    """
    widths: dict[str, int] = {}
    wanted: dict[str, int] = {}
    room = columns - 1
    for key, of_key in texts.items():
        wanted[key] = width = max(map(_width, (heads[key], *of_key)))
        if key in left:
            words = [word for text in of_key for word in text.split()] if key in typed else []
            width = min(width, max(LEAST_TEXT, columns // 4, *map(_width, words)))
        if width < room or not widths:
            widths[key] = width
            room -= 1 + width
    for key in widths:
        more = min(wanted[key] - widths[key], max(0, room))
        widths[key] += more
        room -= more
    return widths


def _width(text: str) -> int:
    """Return the columns that a text of several lines takes."""
    if text.isascii() and "\n" not in text:
        return len(text)
    from rich.cells import cell_len

    return max(map(cell_len, text.split("\n")))


def _lines(groups: Sequence[str], widths: Mapping[str, int], left: Sequence[str], *, above: bool = False) -> list[str]:
    """Write a row of a table; cells with fewer lines than others have empty ones below, or `above`."""
    parts = [group.split("\n") for group in groups]
    height = max(map(len, parts))
    parts = [[""] * (height - len(part)) + part if above else part + [""] * (height - len(part)) for part in parts]
    found = []
    for row in zip(*parts):
        padded = [
            text + gap if key in left else gap + text
            for text, (key, width) in zip(row, widths.items())
            for gap in [" " * (width - _width(text))]
        ]
        found.append(f" {' '.join(padded)}".rstrip())
    return found


def _folded(text: str, width: int) -> str:
    """Divide a text into lines: behind commas and before brackets, if that suffices, so that `lr 0.1` stays whole."""
    if len(text) <= width and "\n" not in text:
        return text
    joined = re.sub(r"(?<!,) (?!\()", "\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(joined, width, break_on_hyphens=False, break_long_words=False)
    if any(len(line) > width for line in lines):
        lines = textwrap.wrap(text, width, break_on_hyphens=False)
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _is_shown() -> bool:
    """Tell whether a terminal shows this: one with a size, for Open MPI's launcher gives ranks one without."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns > 0
    except (OSError, ValueError):
        return False


def _is_file() -> bool:
    with suppress(OSError, ValueError):
        return stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
    return True


def line(text: str, before: str = "") -> None:
    """Show text, such as a finding: on a terminal wrapped to its width behind `before`, elsewhere in one line."""
    if _is_shown():
        _print_text(visible(text), before, len(before))
    else:
        print(visible(before + text), flush=True)


# --- descriptions -----------------------------------------------------------------------------------------------------
def overview(found: Mapping[str, Any]) -> None:
    """Show each by its name with the first sentence of its docstring."""
    width = max(map(len, found))
    for name, algorithm in found.items():
        sentence = re.split(r"(?<=\.)\s|\n\n", inspect.getdoc(algorithm) or "", maxsplit=1)[0]
        _print_text(sentence, f"{name:<{width}}  ", width + 2)


def algorithm(
    name: str, found: Any, options: Sequence[Option] = (), examples: Sequence[str] = (), more: str = ""
) -> None:
    """Show what an algorithm does and costs, by its docstring; its options, its source, and commands that use it."""
    head, _, reference = (inspect.getdoc(found) or "").partition("Reference:")
    print(name)
    for paragraph in head.strip().split("\n\n"):
        if not re.match(r"\w+:\n", paragraph):  # Args, Raises...
            _print_text(paragraph)
    if more:
        _print_text(more)
    if options:
        print("\n    Options, each set by --set KEY=VALUE:")
    for option in options:
        described = (option.type, option.rule, f"default {option.default}" if option.default else "required")
        _print_text(f"{option.key} ({', '.join(filter(None, described))}): {option.description}", hanging=8)
    if reference:
        print()
        _print_text(f"Reference: {reference}", hanging=8)
    if examples:
        print("\n    Example:")
    for command in examples:
        whole = command.replace("--set ", "--set\N{NO-BREAK SPACE}")
        lines = textwrap.wrap(whole, columns() - 12, break_on_hyphens=False, break_long_words=False)
        print("        " + " \\\n            ".join(lines).replace("\N{NO-BREAK SPACE}", " "))
    print()


def _print_text(text: str, before: str = " " * 4, hanging: int = 4) -> None:
    wrapper = textwrap.TextWrapper(columns(), before, " " * hanging, break_on_hyphens=False)
    print(wrapper.fill(" ".join(text.split())))


def columns() -> int:
    """Return the width for text: the terminal's, but no more than can be read well."""
    return min(TEXT_COLUMNS, shutil.get_terminal_size((TEXT_COLUMNS, 24)).columns)


def topology(found: Topology) -> None:
    """Show facts about a topology, and a table of its neighbours for each step that differs."""
    from hpcdist.tools.topology import adjacency, describe, steps

    facts(describe(found))
    for step in steps(found):
        rows(None if found.static else f"step {step}", adjacency(found, step))


def facts(found: Mapping[str, Any], indent: int = 0) -> None:
    """Show a nested description, a line per fact."""
    for key, value in found.items():
        if isinstance(value, Mapping) and value:
            print(f"{'  ' * indent}{visible(key)}:")
            facts(value, indent + 1)
        else:
            print(f"{'  ' * indent}{visible(f'{key}: {value}')}")


# --- what takes a while -----------------------------------------------------------------------------------------------
def tracked(items: Sequence[T], title: str) -> Iterator[T]:
    """Yield all items. Meanwhile a terminal shows how many have been taken."""
    from rich.console import Console
    from rich.progress import track

    yield from track(items, title, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


@contextmanager
def downloads() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show files that are downloaded, on a terminal: a bar for each. Yield the function that is told of every block."""
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
