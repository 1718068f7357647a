"""What the command line shows: progress, tables, errors. Results go to standard output, all else to standard error."""

from __future__ import annotations

import enum
import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # they import torch, which takes seconds
    from hpcdist.compress import Compressor
    from hpcdist.records import Summary
    from hpcdist.strategies import Strategy
    from hpcdist.topology import Topology
    from hpcdist.train import Progress

PIPED_COLUMNS = 140  # of a table that does not go to a terminal
TEXT_COLUMNS = 100  # longer lines are hard to read


def error(message: str) -> None:
    """One error."""
    note(f"error: {message}")


def note(message: str) -> None:
    """Something that the user should know."""
    print(f"hpcdist: {message}", file=sys.stderr, flush=True)


# --- progress ---------------------------------------------------------------------------------------------------------
class ProgressMode(str, enum.Enum):
    auto = "auto"
    live = "live"
    lines = "lines"
    off = "off"


def progress(mode: ProgressMode, ranks: int) -> Callable[[str, Progress], None] | None:
    """What shows a run's progress: one line that is rewritten (live), a line per report, or nothing.

    A launcher may give ranks a terminal of its own while its output goes to a file, so that with several ranks `auto`
    means lines; whoever knows that there is a terminal asks for `live`.
    """
    if mode is ProgressMode.off:
        return None
    if mode is ProgressMode.live or (mode is ProgressMode.auto and ranks == 1 and sys.stdout.isatty()):
        return _show_live
    return _show_line


def _show_line(name: str, now: Progress) -> None:
    print(f"{name:<16} {now.samples / now.total_samples:4.0%}  {_figures(now)}", flush=True)


def _show_live(name: str, now: Progress) -> None:
    columns = shutil.get_terminal_size().columns - 1  # writing the last one may begin a new line
    figures = _figures(now)
    bar = _bar(now.samples / now.total_samples, min(24, max(4, columns - 18 - len(figures))))
    end = "\n" if now.epoch == now.epochs else ""
    print(f"\r\x1b[2K{f'{name:<16} {bar} {figures}'[:columns]}", end=end, flush=True)


def _figures(now: Progress) -> str:
    """What matters most first: a narrow terminal cuts off the rest."""
    epoch = max(1, -(-now.samples * now.epochs // now.total_samples))  # the one under way, or that has just ended
    parts = [f"epoch {epoch:>{len(str(now.epochs))}}/{now.epochs}"]
    parts += [f"test {name} {value:.4f}" for name, value in now.metrics.items() if name != "loss"]
    parts += [] if now.loss is None else [f"loss {now.loss:.4f}"]
    parts += [f"{now.samples / now.seconds:.0f} samples/s"] if now.seconds > 0 else []
    return "  ".join(parts)


def _bar(fraction: float, width: int) -> str:
    full, rest = "█·" if "utf" in (sys.stdout.encoding or "").lower() else "#."
    done = round(min(fraction, 1.0) * width)
    return full * done + rest * (width - done)


# --- runs -------------------------------------------------------------------------------------------------------------
def result(folder: Path, summary: Summary) -> None:
    """How a run ended, in one line."""
    metrics = ", ".join(f"test {name} {value:.4f}" for name, value in summary.metrics.items())
    ranks = f"{summary.ranks} rank{'s' * (summary.ranks > 1)}"
    lost = f", went on without rank {', '.join(map(str, summary.lost_ranks))}" if summary.lost_ranks else ""
    print(f"{summary.strategy} on {ranks}{lost}: {metrics}, {summary.wall_s:.1f} s; records in {folder}", flush=True)


def runs(found: Mapping[Path, Summary]) -> None:
    """One row per run, with its folder where the strategy does not tell which one it is."""
    metrics = dict.fromkeys(name for summary in found.values() for name in summary.metrics if name != "loss")
    named = len({summary.strategy for summary in found.values()}) < len(found)
    _print_table(
        [
            {
                **({"run": str(folder)} if named else {}),
                "strategy": s.strategy,
                "ranks": s.ranks,
                **{f"test\n{name}": f"{s.metrics[name]:.4f}" if name in s.metrics else "" for name in metrics},
                "seconds": f"{s.wall_s:.1f}",
                "samples\n/s": f"{s.samples / max(s.wall_s, 1e-9):.0f}",
                "staleness\nmean": f"{s.staleness.mean:.2f}",
                "max": s.staleness.max,
                "kB/step": f"{s.bytes_per_step / 1e3:.1f}",
                "waiting\ns": f"{s.seconds.waiting:.2f}",
            }
            for folder, s in found.items()
        ],
        left=("run", "strategy"),
    )


def rows(title: str | None, found: Sequence[Mapping[str, Any]]) -> None:
    """Measurements as a table: one column per key of the first row."""
    left = [key for key, value in found[0].items() if isinstance(value, str)]
    _print_table([{key: _figure(row.get(key)) for key in found[0]} for row in found], left, title)


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _print_table(found: Sequence[Mapping[str, Any]], left: Sequence[str], title: str | None = None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=0)  # fits 80 columns
    for key in found[0]:
        table.add_column(key, justify="left" if key in left else "right", overflow="fold")
    for row in found:
        table.add_row(*map(str, row.values()))
    shown = _is_shown()
    Console(highlight=False, markup=False, force_terminal=shown, width=None if shown else PIPED_COLUMNS).print(table)


def _is_shown() -> bool:
    """Whether a terminal shows this. One of no size is what Open MPI's launcher gives its ranks, whoever reads it."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns > 0
    except (OSError, ValueError):
        return False


def finding(status: str, check: str, text: str) -> None:
    """What the doctor has found, in one line."""
    print(f"{status:<8} {check:<9} {text}", flush=True)


# --- descriptions -----------------------------------------------------------------------------------------------------
def algorithms(found: Mapping[str, type[Strategy] | type[Compressor]], where: str) -> None:
    """Every one by its name: what it does and costs, its options, its reference. `where`: their table's dotted key."""
    from hpcdist.config import describe

    for name, algorithm in found.items():
        head, _, reference = (inspect.getdoc(algorithm) or "").partition("Reference:")
        print(name)
        what, *more = head.split("\n\n")
        for paragraph in (what, *(text for text in more if text.startswith(("Bytes", "Error")))):
            _print_text(paragraph)
        for option in describe(algorithm.Config, where):
            default = f", default {option.default}" if option.default else ""
            _print_text(f"{option.key} ({option.type}{default}): {option.description}", hanging=True)
        _print_text(f"Reference: {reference}", hanging=True)
        print()


def _print_text(text: str, hanging: bool = False) -> None:
    columns = min(TEXT_COLUMNS, shutil.get_terminal_size((TEXT_COLUMNS, 24)).columns)
    after = " " * (8 if hanging else 4)
    print(textwrap.fill(" ".join(text.split()), columns, initial_indent=" " * 4, subsequent_indent=after))


def topology(found: Topology) -> None:
    """Facts about a topology, and a table of its neighbours for each step that differs."""
    from hpcdist.topology.description import adjacency, describe, steps

    facts(describe(found))
    for step in steps(found):
        rows(None if found.static else f"step {step}", adjacency(found, step))


def facts(found: Mapping[str, Any], indent: int = 0) -> None:
    """A nested description, a line per fact."""
    for key, value in found.items():
        if isinstance(value, Mapping) and value:
            print(f"{'  ' * indent}{key}:")
            facts(value, indent + 1)
        else:
            print(f"{'  ' * indent}{key}: {value}")
