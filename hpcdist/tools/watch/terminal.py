"""Show runs in a terminal: a frame that is redrawn, or a line per update."""

from __future__ import annotations

import math
import statistics
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from hpcdist.tools.console import amount, bar, duration, error, shortened
from hpcdist.tools.watch.view import PARTS, RankView, RunView, WatchedFolder

SIDE_BY_SIDE = 76  # columns for two plots next to each other
PLOT_ROWS = 6
MAX_RANKS = 16  # listed; the others are counted
BAR = 24  # columns of a rank's bar, if they fit
MIN_NAME = 12  # columns of a run's name
RISING = "▁▂▃▄▅▆▇█"
STYLES = ("blue", "yellow", "bright_black")  # of computing, communicating, waiting
STATES = {"training": "green", "ended": "bold green", "dead": "bold red", "failed": "bold red"}
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille character: by column, from top to bottom
LABEL = 7  # characters of the numbers on the left of a curve


def watch(folder: Path, every_s: float, once: bool) -> bool:
    """Show the runs of a folder until they have ended; with `once`, only their current state.

    Returns False if no process is running, but runs have no summaries.
    """
    watched, console = WatchedFolder(folder), Console(highlight=False)
    watched.update()
    if once:
        console.print(_drawn(watched, console), soft_wrap=True)
    elif console.is_terminal:
        _watch_live(watched, console, every_s)
    else:
        _watch_lines(watched, every_s)
    if not watched.abandoned:
        return True
    unfinished = [run for run in watched.runs.values() if not run.ended]
    if [run.state for run in unfinished] in (["interrupted"], ["failed"]):
        if not watched.is_run or not (once or console.is_terminal):  # else it is in the drawing
            error(f"{unfinished[0].folder} {unfinished[0].failure}")
        return False
    count = max(watched.planned, len(watched.runs), 1)
    missing = count - len(watched.runs) + len(unfinished)
    subject = "it has" if count == 1 else f"{missing} of {count} runs have"
    error(
        f"no process is running in {folder}, and {subject} no summary: see the messages of the run. Resume with the "
        "command that started it; for hpcdist train add --resume."
    )
    return False


def _watch_live(watched: WatchedFolder, console: Console, every_s: float) -> None:
    with Live(_drawn(watched, console), console=console, auto_refresh=False) as live:
        while not (watched.ended or watched.abandoned):
            time.sleep(every_s)
            watched.update()
            live.update(_drawn(watched, console), refresh=True)


def _watch_lines(watched: WatchedFolder, every_s: float) -> None:
    """Print a line for each run that has advanced since its last line."""
    printed: dict[str, tuple[str, int]] = {}
    while True:
        for view in watched.views():
            if printed.get(view.name) != (view.state, view.step):
                printed[view.name] = view.state, view.step
                print("  ".join(filter(None, (view.name, *_facts(view)))), flush=True)
        if watched.ended or watched.abandoned:
            return
        time.sleep(every_s)
        watched.update()


def _drawn(watched: WatchedFolder, console: Console) -> Text:
    """Draw the folder's run in detail, or several runs as a table."""
    braille = "utf" in console.encoding.lower()
    if not watched.runs:
        return Text(f"{watched.folder}: no run has started yet")
    if watched.is_run:
        return frame(watched.views(curves=True)[0], console.width, braille=braille)
    views = watched.views()
    return table(views, console.width, planned=watched.planned, left_s=watched.left_s(views), braille=braille)


# --- one run ----------------------------------------------------------------------------------------------------------
def frame(view: RunView, columns: int, *, braille: bool = True) -> Text:
    """Draw one run in lines of at most `columns` characters."""
    lines = [_title(view, columns, braille), _progress(view, columns, braille), *_figures(view, columns)]
    lines += [Text(line, "yellow") for note in view.notes for line in textwrap.wrap(note, columns)]
    lines += [Text(), *map(Text, _plots(view, columns, braille)), *_ranks(view, columns, braille)]
    lines += _usage(view, columns, braille)
    for line in lines:
        line.truncate(columns)
    return Text("\n").join(lines)


def _title(view: RunView, columns: int, braille: bool) -> Text:
    title = f"{view.name}  {view.strategy} on {view.ranks_n} rank{'s' * (view.ranks_n != 1)}"
    title += " (virtual)" * view.virtual
    title = shortened(title, columns - len(view.state) - 2, ascii_only=not braille)
    state = f"{view.state:>{max(len(view.state) + 2, columns - len(title))}}"
    return Text(title, "bold").append(state, STATES.get(view.state, "yellow"))


def _progress(view: RunView, columns: int, braille: bool) -> Text:
    figures = f" {view.fraction:4.0%}" if view.fraction is not None else ""
    figures += f"  {duration(view.seconds)}"
    figures += f", {duration(view.left_s)} left" if view.left_s is not None else ""
    done = bar(view.fraction or 0.0, max(4, columns - len(figures) - 1), ascii_only=not braille)
    return Text(done, "green").append(figures, "default")


def _figures(view: RunView, columns: int) -> list[Text]:
    """Return lines with a run's progress, speed, costs of communication, loss and metrics."""
    limits = f" (ends after {' or '.join(view.limits)})" if view.limits else ""
    metrics = [f"{name} {_number(value)}" for name, value in view.metrics.items() if name != "loss"]
    metrics += [f"test loss {_number(view.metrics['loss'])}"] if "loss" in view.metrics else []
    now = f"{view.rate_now:,.0f} samples/s now, {view.rate_mean:,.0f} mean"
    speed = now if view.rate_now else f"{view.rate_mean:,.0f} samples/s"
    costs = [f"staleness {view.staleness:.2f}", f"{amount(view.bytes_per_step)}/step", f"waiting {view.waiting:.0%}"]
    paragraphs = (
        [f"epoch {view.epoch}, step {view.step:,}, {view.samples:,} samples{limits}"],
        [speed, *costs],
        [*([f"loss {_number(view.loss)}"] if view.loss is not None else []), *metrics],
    )
    return [Text(line) for parts in paragraphs for line in _filled(parts, columns)]


def _filled(parts: Sequence[str], columns: int) -> list[str]:
    """Join parts to lines, as many per line as fit."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= columns:
            lines[-1] += f"   {part}"
        else:
            lines.append(part)
    return lines


def _plots(view: RunView, columns: int, braille: bool) -> list[str]:
    """Draw the loss over steps, and next to it, or below if `columns` are few, the first metric."""
    curves = {"loss": view.loss_curve, **dict(list(view.metric_curves.items())[:1])}
    titled = {name: [(moment.step, moment.value) for moment in points] for name, points in curves.items() if points}
    side_by_side = columns >= SIDE_BY_SIDE and len(titled) == 2
    width = columns // 2 - 1 if side_by_side else columns
    drawn = [
        [f"{'':{LABEL}} {name}".ljust(width), *curve(points, width, PLOT_ROWS, braille=braille)]
        for name, points in titled.items()
    ]
    if side_by_side:
        return [f"{left:<{width}}  {right}".rstrip() for left, right in zip(*drawn)]
    return [line.rstrip() for lines in drawn for line in lines]


def _ranks(view: RunView, columns: int, braille: bool) -> list[Text]:
    """Draw the shares of each rank's time as a bar; of more than MAX_RANKS ranks, stragglers are preferred."""
    if not view.ranks:
        return []
    signs = "█▓░" if braille else "#=."
    parts = [*zip(signs, PARTS, STYLES)]
    legend = Text("  rank  ")
    for sign, name, style in parts:
        legend.append(sign * 2, style).append(f" {name}  ")
    chosen = sorted(view.ranks, key=lambda rank: (rank.slower is None and rank.silent_s is None, rank.rank))[:MAX_RANKS]
    lines, width = [Text(), legend], max(8, min(BAR, columns - 50))  # the rest is for the rank's text
    for rank in sorted(chosen, key=lambda rank: rank.rank):
        line, shares = Text(f"{rank.rank:>6}  "), (rank.computing, rank.communicating, rank.waiting)
        for (sign, _, style), count in zip(parts, _divided(shares, width)):
            line.append(sign * count, style)
        line.append(" " * (width - len(line.plain) + 8))
        line.append("".join(f"{share:5.0%}" for share in shares))
        lines.append(line.append(f"  step {rank.step:,}").append(_rank_text(rank), "bold red"))
    hidden = len(view.ranks) - len(chosen)
    return lines + ([Text(f"        and {hidden} more ranks")] if hidden else [])


def _rank_text(rank: RankView) -> str:
    text = ", serves" * rank.serves
    text += f", {rank.slower:.1f} times slower" if rank.slower is not None else ""
    return text + (f", silent for {duration(rank.silent_s)}" if rank.silent_s is not None else "")


def _usage(view: RunView, columns: int, braille: bool) -> list[Text]:
    """Draw a table of each rank's newest hardware usage, with a sparkline of its busy cores over time."""
    heads = {"cores": "cores", "gpu": "GPU", "gpu_memory_bytes": "GPU memory", "memory_bytes": "memory",
             "received_bytes_s": "host receives", "sent_bytes_s": "host sends"}  # fmt: skip
    quantities = [name for name in heads if name in view.usage]
    ranks = view.usage.get("cores", {})
    highest = max((value for points in ranks.values() for _, value in points), default=0.0)
    rows = [["rank", *(heads[name] for name in quantities)]]
    for rank, points in ranks.items():
        texts = [
            _used(name, history_points[-1][1]) if (history_points := view.usage[name].get(rank)) else ""
            for name in quantities
        ]
        history = _sparkline([value for _, value in points], highest) if braille else ""
        rows.append([f"{rank:>6}", " ".join([history, f"{texts[0]:>5}"]).strip(), *texts[1:]])
    return [Text(), *map(Text, _aligned(rows, columns))] if ranks else []


def _used(name: str, value: float) -> str:
    if name in ("cores", "gpu"):
        return f"{value:.2f}" if name == "cores" else f"{value:.0%}"
    return amount(value) + "/s" * name.endswith("_s")


def _sparkline(values: Sequence[float], highest: float) -> str:
    """Draw values from 0 to `highest` as a sparkline; each character is the mean of several values."""
    size = -(-len(values) // len(RISING))
    means = [statistics.fmean(values[first : first + size]) for first in range(0, len(values), size)]
    return "".join(RISING[round(mean / max(highest, 1e-9) * (len(RISING) - 1))] for mean in means)


def _aligned(rows: Sequence[Sequence[str]], columns: int, n_left: int = 0) -> list[str]:
    """Align a table's first `n_left` columns to the left, others to the right; drop the last columns that don't fit."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    while len(widths) > 1 and sum(widths) + 2 * (len(widths) - 1) > columns:
        widths.pop()
    return [
        "  ".join(
            f"{cell:<{width}}" if index < n_left else f"{cell:>{width}}"
            for index, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]


# --- several runs -----------------------------------------------------------------------------------------------------
def table(
    views: Sequence[RunView], columns: int, *, planned: int = 0, left_s: float | None = None, braille: bool = True
) -> Text:
    """Draw a line per run, running ones first; a narrow terminal drops the last, least important columns."""
    ended = sum(view.state == "ended" for view in views)
    title = f"{ended} of {max(planned, len(views))} runs have ended"
    title += "" if left_s is None else f", about {duration(left_s)} left for all"
    views = sorted(views, key=lambda view: view.state == "ended")
    metrics = [name for name in dict.fromkeys(name for view in views for name in view.metrics) if name != "loss"]
    texts = {
        "run": [shortened(view.label, max(MIN_NAME, columns // 3), ascii_only=not braille) for view in views],
        "": [bar(view.fraction or 0.0, 8, ascii_only=not braille) for view in views],
        "done": [f"{view.fraction or 0:.0%}" if view.state == "training" else view.state for view in views],
        "left": ["" if view.left_s is None else duration(view.left_s) for view in views],
        **{name: [_number(view.metrics[name]) if name in view.metrics else "" for view in views] for name in metrics},
        "loss": ["" if view.loss is None else _number(view.loss) for view in views],
        "step": [f"{view.step:,}" if view.step else "" for view in views],
        "samples/s": [f"{rate:,.0f}" if (rate := view.rate_now or view.rate_mean) else "" for view in views],
        "slow ranks": [", ".join(_slow(view)) for view in views],
    }
    filled = [[name, *column] for name, column in texts.items() if any(column)]
    head, *lines = _aligned(list(zip(*filled)), columns, n_left=2)
    return Text("\n").join([Text(title, "bold"), Text(head, "bright_black"), *map(Text, lines)])


def _facts(view: RunView) -> list[str]:
    """Return a run's figures for one line of output."""
    facts = [view.state if view.state != "training" else f"{view.fraction or 0:.0%}"]
    facts += [f"{name} {_number(value)}" for name, value in view.metrics.items() if name != "loss"]
    facts += [f"loss {_number(view.loss)}"] if view.loss is not None else []
    facts += [f"step {view.step:,}"] if view.step else []
    facts += [f"{view.rate_now or view.rate_mean:,.0f} samples/s"] if view.rate_mean else []
    facts += [f"{duration(view.left_s)} left"] if view.left_s is not None else []
    return facts + ([f"slow: rank {', '.join(slow)}"] if (slow := _slow(view)) else [])


def _slow(view: RunView) -> list[str]:
    return [str(rank.rank) for rank in view.ranks if rank.slower is not None and view.state == "training"]


def _number(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"


# --- curves and bars -------------------------------------------------------------------------------------------------
def curve(points: Sequence[tuple[float, float]], columns: int, rows: int, *, braille: bool = True) -> list[str]:
    """Draw a curve in `rows` lines of `columns` characters, its range on the left, and a line with first and last x."""
    points = [(x, y) for x, y in points if math.isfinite(y)]
    if not points:
        return [" " * columns] * (rows + 1)
    width, height = 2 * (columns - LABEL - 1), 4 * rows  # in dots
    low, high = min(y for _, y in points), max(y for _, y in points)
    characters = [[0] * (width // 2) for _ in range(rows)]  # bits of DOTS
    prior = None
    for column, y in enumerate(_resampled(points, width)):
        dot = height // 2 if high == low else round((high - y) / (high - low) * (height - 1))
        prior = dot if prior is None else prior
        for y_dot in range(min(dot, prior), max(dot, prior) + 1):
            characters[y_dot // 4][column // 2] |= DOTS[column % 2][y_dot % 4]
        prior = dot
    drawn = ["".join(chr(0x2800 + dots) if braille else " *"[dots > 0] for dots in line) for line in characters]
    ends = [text if len(text := f"{value:.3g}") <= LABEL else f"{value:.1e}" for value in (high, low)]
    labels = [ends[0], *[""] * (rows - 2), ends[1]] if high > low else [*[""] * (rows // 2), ends[1]]
    labels += [""] * (rows - len(labels))
    first, last = f"{points[0][0]:.0f}", f"{points[-1][0]:.0f}"
    below = f"{'step':>{LABEL}} {first}{last:>{width // 2 - len(first)}}"
    return [f"{label:>{LABEL}} {line}" for label, line in zip(labels, drawn)] + [below]


def _resampled(points: Sequence[tuple[float, float]], width: int) -> list[float]:
    """Return for each of `width` columns the mean of the points' y in it, interpolated in empty columns."""
    x, y = np.transpose(points)
    if x[0] == x[-1]:
        return [float(y.mean())]
    column = np.round((x - x[0]) / (x[-1] - x[0]) * (width - 1)).astype(int)
    count = np.bincount(column, minlength=width)
    known = np.flatnonzero(count)
    return np.interp(range(width), known, np.bincount(column, y, width)[known] / count[known]).tolist()


def _divided(parts: Sequence[float], columns: int) -> list[int]:
    """Divide `columns` characters in proportion to parts of 1; they sum to `columns` if the parts sum to 1."""
    ends = [round(min(1.0, sum(parts[: n + 1])) * columns) for n in range(len(parts))]
    return [end - start for start, end in zip([0, *ends], ends)]
