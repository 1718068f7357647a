"""Show runs in a terminal: a frame that is drawn anew, or a line now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from hpcdist.tools.console import amount, bar, duration, error, visible
from hpcdist.tools.watch.view import PARTS, RankView, RunView, WatchedFolder

SIDE_BY_SIDE = 76  # columns that two plots need
PLOT_ROWS = 6
MOST_RANKS = 16  # shown; the others are counted
BAR = 24
STYLES = ("blue", "yellow", "bright_black")  # of computing, communicating, waiting
STATES = {"training": "green", "ended": "bold green", "stopped": "bold red", "failed": "bold red"}
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille character: by column, from above
LABEL = 7  # characters of the numbers on the left of a curve


def watch(folder: Path, every_s: float, once: bool) -> bool:
    """Show the runs of a folder until they have ended; with `once` only their present state.

    Returns False where no process is at work any more, though runs lack their summaries.
    """
    watched, console = WatchedFolder(folder), Console(highlight=False)
    watched.update()
    if once:
        console.print(_drawn(watched, console), soft_wrap=True)
    elif console.is_terminal:
        _watch_live(watched, console, every_s)
    else:
        _watch_lines(watched, every_s)
    if once or not watched.abandoned:
        return True
    count = max(watched.planned, len(watched.runs), 1)
    which = (
        "it has" if count == 1 else f"{count - sum(run.ended for run in watched.runs.values())} of {count} runs have"
    )
    error(
        f"no process is at work in {folder}, and {which} no summary: see the messages of the run. The command that "
        "began it goes on with it; for hpcdist train add --resume."
    )
    return False


def _watch_live(watched: WatchedFolder, console: Console, every_s: float) -> None:
    with Live(_drawn(watched, console), console=console, auto_refresh=False) as live:
        while not (watched.ended or watched.abandoned):
            time.sleep(every_s)
            watched.update()
            live.update(_drawn(watched, console), refresh=True)


def _watch_lines(watched: WatchedFolder, every_s: float) -> None:
    """Print a line for each run that has got on since its last one."""
    printed: dict[str, tuple[str, int]] = {}
    while True:
        for view in _views(watched):
            if printed.get(view.name) != (view.state, view.step):
                printed[view.name] = view.state, view.step
                print("  ".join(filter(None, (view.name, *_facts(view)))), flush=True)
        if watched.ended or watched.abandoned:
            return
        time.sleep(every_s)
        watched.update()


def _drawn(watched: WatchedFolder, console: Console) -> Text:
    braille = "utf" in console.encoding.lower()
    if not watched.runs:
        return Text(f"{watched.folder}: no run has begun yet")
    if watched.is_run:
        return frame(_views(watched, curves=True)[0], console.width, braille=braille)
    return table(_views(watched), console.width, planned=watched.planned, braille=braille)


def _views(watched: WatchedFolder, *, curves: bool = False) -> list[RunView]:
    """Return the state of each run, with control characters as text."""
    return [
        replace(
            one, name=visible(one.name), strategy=visible(one.strategy), notes=tuple(map(visible, one.notes)),
            metrics={visible(name): value for name, value in one.metrics.items()},
            metric_curves={visible(name): points for name, points in one.metric_curves.items()},
        )
        for one in watched.views(curves=curves)
    ]  # fmt: skip


# --- one run ----------------------------------------------------------------------------------------------------------
def frame(view: RunView, columns: int, *, braille: bool = True) -> Text:
    """Draw one run in lines of at most `columns` characters."""
    lines = [_title(view, columns), _progress(view, columns, braille), *_figures(view)]
    lines += [*(Text(note, "yellow") for note in view.notes), Text()]
    lines += [Text(line) for line in _plots(view, columns, braille)]
    lines += _ranks(view, columns, braille)
    for line in lines:
        line.truncate(columns)
    return Text("\n").join(lines)


def _title(view: RunView, columns: int) -> Text:
    what = f"{view.name}  {view.strategy} on {view.ranks_n} rank{'s' * (view.ranks_n != 1)}"
    what += " (virtual)" * view.virtual
    state = f"{view.state:>{max(len(view.state) + 2, columns - len(what))}}"
    return Text(what, "bold").append(state, STATES.get(view.state, "yellow"))


def _progress(view: RunView, columns: int, braille: bool) -> Text:
    figures = f" {view.fraction:4.0%}" if view.fraction is not None else ""
    figures += f"  {duration(view.seconds)}"
    figures += f", {duration(view.left_s)} left" if view.left_s is not None else ""
    done = bar(view.fraction or 0.0, max(4, columns - len(figures) - 1), ascii_only=not braille)
    return Text(done, "green").append(figures, "default")


def _figures(view: RunView) -> list[Text]:
    limits = f" (ends after {' or '.join(view.limits)})" if view.limits else ""
    metrics = [f"{name} {_number(value)}" for name, value in view.metrics.items() if name != "loss"]
    metrics += [f"test loss {_number(view.metrics['loss'])}"] if "loss" in view.metrics else []
    now = f"{view.rate_now:,.0f} samples/s now, {view.rate_mean:,.0f} mean"
    speed = now if view.rate_now else f"{view.rate_mean:,.0f} samples/s"
    lines = [
        f"epoch {view.epoch}, step {view.step:,}, {view.samples:,} samples{limits}",
        f"{speed}   staleness {view.staleness:.2f}   {amount(view.bytes_per_step)}/step   waiting {view.waiting:.0%}",
        "   ".join([*([f"loss {_number(view.loss)}"] if view.loss is not None else []), *metrics]),
    ]
    return [Text(line) for line in lines if line]


def _plots(view: RunView, columns: int, braille: bool) -> list[str]:
    """Draw the loss, and beside it or below the first metric."""
    titled = {"loss": view.loss_curve}
    titled |= {name: points for name, points in list(view.metric_curves.items())[:1] if points}
    titled = {name: points for name, points in titled.items() if points}
    beside = columns >= SIDE_BY_SIDE and len(titled) == 2
    width = columns // 2 - 1 if beside else columns
    drawn = [
        [f"{'':{LABEL}} {name}".ljust(width), *curve(points, width, PLOT_ROWS, braille=braille)]
        for name, points in titled.items()
    ]
    if beside:
        return [f"{left:<{width}}  {right}".rstrip() for left, right in zip(*drawn)]
    return [line.rstrip() for lines in drawn for line in lines]


def _ranks(view: RunView, columns: int, braille: bool) -> list[Text]:
    if not view.ranks:
        return []
    full = "█▓░" if braille else "#=."
    parts = [*zip(full, PARTS, STYLES)]
    legend = Text("  rank  ")
    for sign, name, style in parts:
        legend.append(sign * 2, style).append(f" {name}  ")
    chosen = sorted(view.ranks, key=lambda one: (one.slower is None and one.silent_s is None, one.rank))[:MOST_RANKS]
    lines = [Text(), legend]
    for one in sorted(chosen, key=lambda one: one.rank):
        line, shares = Text(f"{one.rank:>6}  "), (one.computing, one.communicating, one.waiting)
        for (sign, _, style), count in zip(parts, _divided(shares, BAR)):
            line.append(sign * count, style)
        line.append(" " * (BAR - len(line.plain) + 8))
        line.append("".join(f"{share:5.0%}" for share in shares))
        lines.append(line.append(f"  step {one.step:,}").append(_said(one), "bold red"))
    hidden = len(view.ranks) - len(chosen)
    return lines + ([Text(f"        and {hidden} more ranks")] if hidden else [])


def _said(one: RankView) -> str:
    said = ", serves" * one.serves
    said += f", {one.slower:.1f} times slower" if one.slower is not None else ""
    return said + (f", silent for {duration(one.silent_s)}" if one.silent_s is not None else "")


# --- several runs -----------------------------------------------------------------------------------------------------
def table(views: list[RunView], columns: int, *, planned: int = 0, braille: bool = True) -> Text:
    """Draw a line per run: those that train first."""
    ended = sum(view.state == "ended" for view in views)
    width = max(len(view.name) for view in views)
    lines = [Text(f"{ended} of {max(planned, len(views))} runs have ended", "bold")]
    for view in sorted(views, key=lambda view: view.state == "ended"):
        line = Text(f"{view.name:<{width}}  ").append(bar(view.fraction or 0.0, 8, ascii_only=not braille), "green")
        line.append("  ".join(["", *_facts(view)]))
        line.truncate(columns)
        lines.append(line)
    return Text("\n").join(lines)


def _facts(view: RunView) -> list[str]:
    """Collect a run's figures for one line; what matters most first: a narrow terminal cuts off the rest."""
    facts = [view.state if view.state != "training" else f"{view.fraction or 0:.0%}"]
    facts += [f"{name} {_number(value)}" for name, value in view.metrics.items() if name != "loss"]
    facts += [f"loss {_number(view.loss)}"] if view.loss is not None else []
    facts += [f"step {view.step:,}"] if view.step else []
    facts += [f"{view.rate_now or view.rate_mean:,.0f} samples/s"] if view.rate_mean else []
    facts += [f"{duration(view.left_s)} left"] if view.left_s is not None else []
    slow = [str(one.rank) for one in view.ranks if one.slower is not None and view.state == "training"]
    return facts + ([f"slow: rank {', '.join(slow)}"] if slow else [])


def _number(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"


# --- curves and bars of characters ------------------------------------------------------------------------------------
def curve(points: Sequence[tuple[float, float]], columns: int, rows: int, *, braille: bool = True) -> list[str]:
    """Draw a curve in lines of `columns` characters: its range on the left, the first and the last x below."""
    points = [(x, y) for x, y in points if math.isfinite(y)]
    if not points:
        return [" " * columns] * (rows + 1)
    width, height = 2 * (columns - LABEL - 1), 4 * rows
    low, high = min(y for _, y in points), max(y for _, y in points)
    cells = [[0] * (width // 2) for _ in range(rows)]
    before = None
    for column, y in enumerate(_resampled(points, width)):
        dot = height // 2 if high == low else round((high - y) / (high - low) * (height - 1))
        for one in range(min(dot, before or dot), max(dot, before or dot) + 1) if before is not None else (dot,):
            cells[one // 4][column // 2] |= DOTS[column % 2][one % 4]
        before = dot
    drawn = ["".join(chr(0x2800 + cell) if braille else " *"[cell > 0] for cell in line) for line in cells]
    labels = [f"{high:.3g}", *[""] * (rows - 2), f"{low:.3g}"] if high > low else [*[""] * (rows // 2), f"{low:.3g}"]
    labels += [""] * (rows - len(labels))
    first, last = f"{points[0][0]:.0f}", f"{points[-1][0]:.0f}"
    below = f"{'step':>{LABEL}} {first}{last:>{width // 2 - len(first)}}"
    return [f"{label:>{LABEL}} {line}" for label, line in zip(labels, drawn)] + [below]


def _resampled(points: Sequence[tuple[float, float]], width: int) -> list[float]:
    """Return the mean of the values that fall on each of `width` columns; between them, the line that joins them."""
    x, y = np.transpose(points)
    if x[0] == x[-1]:
        return [float(y.mean())]
    column = np.round((x - x[0]) / (x[-1] - x[0]) * (width - 1)).astype(int)
    count = np.bincount(column, minlength=width)
    known = np.flatnonzero(count)
    return np.interp(range(width), known, np.bincount(column, y, width)[known] / count[known]).tolist()


def _divided(parts: Sequence[float], columns: int) -> list[int]:
    """Divide `columns` characters by parts of 1, so that they sum to `columns` if the parts sum to 1."""
    ends = [round(min(1.0, sum(parts[: n + 1])) * columns) for n in range(len(parts))]
    return [end - start for start, end in zip([0, *ends], ends)]
