"""What the command line shows: progress, tables, errors."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hpcdist.config import describe
from hpcdist.errors import ConfigError
from hpcdist.records import Summary
from hpcdist.strategies import Strategy
from hpcdist.train import Progress

_out = Console(highlight=False)
WIDTH = 120  # of a table that does not go to a terminal
MODES = ("auto", "live", "lines", "off")


def error(message: str) -> None:
    """One error, on standard error."""
    print(f"hpcdist: error: {message}", file=sys.stderr, flush=True)


def progress(mode: str) -> Callable[[str, Progress], None] | None:
    """What shows a run's progress: a line that is rewritten (live), a line per report, or nothing.

    Under mpirun no rank has a terminal, so `auto` gives lines there; a script that has one asks for `live`.
    """
    if mode not in MODES:
        raise ConfigError(f"--progress must be one of {', '.join(MODES)}; got {mode!r}.")
    if mode == "off":
        return None
    live = mode == "live" or (mode == "auto" and sys.stdout.isatty())

    def show(name: str, now: Progress) -> None:
        done = now.samples >= now.total_samples
        loss = "" if now.loss is None else f"  loss {now.loss:.4f}"
        metrics = "".join(f"  test {k} {v:.4f}" for k, v in now.metrics.items() if k != "loss")
        speed = now.samples / now.seconds if now.seconds > 0 else 0.0
        bar = _bar(now.samples / now.total_samples)
        text = f"{name:>18} {bar} epoch {now.epoch:>3}/{now.epochs}  {speed:7.0f} samples/s{loss}{metrics}"
        if live:
            print(f"\r\x1b[2K{text}", end="\n" if done else "", flush=True)
        else:
            print(text, flush=True)

    return show


def _bar(fraction: float, width: int = 20) -> str:
    full = round(min(fraction, 1.0) * width)
    return "█" * full + "·" * (width - full)


def runs(found: Sequence[tuple[Path, Summary]]) -> None:
    """One row per run."""
    metrics = list(dict.fromkeys(name for _, s in found for name in s.metrics if name != "loss"))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("strategy")
    for heading in (
        "ranks", *(f"test {m}" for m in metrics), "seconds", "samples/s", "staleness mean", "max", "kB/step", "waiting s"
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for _, s in found:
        values = [f"{s.metrics[m]:.4f}" if m in s.metrics else "" for m in metrics]
        table.add_row(
            s.strategy, str(s.ranks), *values, f"{s.wall_s:.1f}", f"{s.samples / max(s.wall_s, 1e-9):.0f}",
            f"{s.staleness.mean:.2f}", str(s.staleness.max), f"{s.bytes_per_step / 1e3:.1f}", f"{s.seconds.waiting:.2f}",
        )  # fmt: skip
    _print(table)


def strategies(classes: Sequence[type[Strategy]], names: Sequence[str]) -> None:
    """Every strategy: what it does, its options, its reference."""
    for name, cls in zip(names, classes, strict=True):
        text = inspect.getdoc(cls) or ""
        head, _, reference = text.partition("Reference:")
        _out.print(f"[bold]{name}[/bold]: {head.strip().splitlines()[0]}")
        for option in describe(cls.Config):
            default = f", default {option.default}" if option.default else ""
            _out.print(f"    {option.key} ({option.type}{default}): {option.description}", markup=False)
        _out.print(f"    Reference: {' '.join(reference.split())}\n", markup=False)


def rows(title: str, found: Sequence[Mapping[str, Any]]) -> None:
    """Measurements as a table: one column per key of the first row."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for key in found[0]:
        table.add_column(key, justify="left" if isinstance(found[0][key], str) else "right")
    for row in found:
        table.add_row(*(_figure(row.get(key)) for key in found[0]))
    _print(table)


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def facts(found: Mapping[str, Any], indent: int = 0) -> None:
    """A nested description, a line per fact."""
    for key, value in found.items():
        if isinstance(value, Mapping) and value:
            print(f"{'  ' * indent}{key}:")
            facts(value, indent + 1)
        else:
            print(f"{'  ' * indent}{key}: {value}")


def _print(table: Table) -> None:
    console = _out if _out.is_terminal else Console(width=WIDTH, highlight=False)
    console.print(table)
