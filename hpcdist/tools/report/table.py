"""The table of a report: a row per group of runs."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

from pandas import DataFrame

from hpcdist.errors import UnknownNameError
from hpcdist.tools import console
from hpcdist.tools.report import wording
from hpcdist.tools.report.analysis import Analysis, RunGroup
from hpcdist.tools.report.methods import methods, optimizers_and_batches
from hpcdist.tools.report.results import JobRuns, is_higher_better
from hpcdist.tools.report.verdict import Verdict, judge
from hpcdist.tools.statistics import MIN_SEEDS, Interval, ratio_of

# Columns shown by default if they hold information, the most important first: before the metric, behind it, and behind
# all other metrics.
BEFORE = ("name", "ranks", "stages", "runs")
AFTER = ("time_to_target_s", "samples_per_s", "speedup", "wall_s")
LAST = ("staleness_mean", "staleness_max", "bytes_per_step", "waiting_s", "bubble", "joules", "skipped", "dropped")
HIGHER_IS_BETTER = ("samples_per_s", "speedup", "samples")
LEFT_OUT = ("job", "comparison", "failure")  # columns of `runs.csv` that the table's title holds
LISTED = 3  # different texts listed for a group; more are counted
SEPARATORS, LEAST_CUT = "/(=, ", 4  # where common prefixes end, and their minimal length
LATEX = str.maketrans(
    {mark: f"\\{mark}" for mark in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\N{NO-BREAK SPACE}": "~"}
    | {"−": "$-$", "±": r"$\pm$", "≥": r"$\ge$", "≤": r"$\le$", "→": r"$\to$", "µ": r"$\mu$"}
)
Entry = tuple[Interval | float | str | None, str]  # the value, for JSON and CSV, and its text for a terminal


@dataclass(frozen=True)
class JobTable:
    """The table of one job: a dict per group, from column to entry."""

    analysis: Analysis
    rows: Sequence[Mapping[str, Entry]]


def tables(
    jobs: Sequence[Analysis], names: Sequence[str] | None = None, sort: str | None = None, *, every: bool = False
) -> list[JobTable]:
    """Create a table for each job.

    Args:
        names: columns; `metric.` and `setting.` may be omitted. None: the most important ones, or all if `every`.
        sort: column to sort by, the best first; None: by ranks, kind and name, or a sweep's by the metric.

    Raises:
        UnknownNameError: no job has such a column.
    """
    rows_by_job = [_rows(analysis) for analysis in jobs]
    # Full names of columns; the first one of a short name stays.
    known = {_short(name): name for rows in reversed(rows_by_job) for row in rows[:1] for name in reversed(row)}

    def full_name(option: str, name: str) -> str:
        if _short(name) not in known:
            raise UnknownNameError(option, name, known)
        return known[_short(name)]

    requested = None if names is None else [full_name("--columns", name) for name in names]
    key = None if sort is None else full_name("--sort", sort)
    created = []
    for analysis, rows in zip(jobs, rows_by_job, strict=True):
        columns = list(rows[0]) if rows else []
        selected = requested or [name for name in columns if every or _is_default(name, rows, analysis.job)]
        sorted_by = key or (f"metric.{analysis.job.metric}" if analysis.job.is_sweep else None)
        if sorted_by in columns:
            rows.sort(key=partial(_sort_key, sorted_by, analysis.job))
        created.append(JobTable(analysis, [{name: row[name] for name in selected if name in row} for row in rows]))
    return created


def show(job_tables: Sequence[JobTable]) -> None:
    """Print each table, without the common prefix of a column's texts, and its conclusion."""
    for table in job_tables:
        heads = _heads(table)
        texts = {name: [row[name][1] for row in table.rows] for name in table.rows[0]}
        text_columns = [name for name, (value, _) in table.rows[0].items() if isinstance(value, (str, bool))]
        for name in text_columns:
            common, texts[name] = _cut_prefix(texts[name])
            heads[name] += f"\n{common}" if common else ""
        rows = [dict(zip(texts, row)) for row in zip(*texts.values())]
        title = f"{table.analysis.job.comparison}: " if table.analysis.job.comparison and len(job_tables) > 1 else ""
        console.rows(title + _title(table.analysis), rows, heads=heads, left_aligned=text_columns, option="--columns")
        if len(table.analysis.groups) > 1:
            console.line(answer(table.analysis).headline)
            console.line("")


def answer(analysis: Analysis) -> Verdict:
    """Return the conclusion on the runs of a job, or of a sweep."""
    if not analysis.job.is_sweep:
        return judge(analysis)
    from hpcdist.tools.report.sweep import judge_sweep, read_sweep

    return judge_sweep(read_sweep(cast(Path, analysis.job.comparison), importance=False))


def as_latex(job_tables: Sequence[JobTable]) -> str:
    """Format tables for LaTeX's package booktabs, each with its methods paragraph."""
    texts = [r"% \usepackage{booktabs}"]
    for table in job_tables:
        heads = [_heads(table)[name].replace("\n", " ").translate(LATEX) for name in table.rows[0]]
        rows = [[text.translate(LATEX) for _, text in row.values()] for row in table.rows]
        columns = "".join("l" if isinstance(value, (str, bool)) else "r" for value, _ in table.rows[0].values())
        parts = [_title(table.analysis), wording.capital(optimizers_and_batches(table.analysis))]
        caption = f"{'. '.join(filter(None, parts))}.".translate(LATEX)
        frame = DataFrame(rows, columns=heads)
        texts.append(frame.to_latex(index=False, column_format=columns, position="htbp", caption=caption))
        texts.append(f"{methods(table.analysis).translate(LATEX)}\n")
    return "\n".join(texts)


def as_data(job_tables: Sequence[JobTable]) -> list[dict[str, Any]]:
    """Return tables for JSON, with unrounded numbers; a mean has the ends of its 95 % interval."""
    return [
        criteria_of(table.analysis.job)
        | {"verdict": answer(table.analysis).headline, "methods": methods(table.analysis)}
        | {"rows": [{name: as_value(value, name) for name, (value, _) in row.items()} for row in table.rows]}
        for table in job_tables
    ]


def criteria_of(job: JobRuns) -> dict[str, Any]:
    """Return a job's title, and the metric, target and reference by which its runs were compared, for JSON."""
    comparison = job.comparison and str(job.comparison)
    keys = ("title", "metric", "higher_is_better", "target", "reference")
    return {"job": job.name, "comparison": comparison} | {key: getattr(job, key) for key in keys}


def as_value(value: object, name: str = "") -> object:
    """Return a column's value for JSON: a mean as a dict with the ends of its interval."""
    if not isinstance(value, Interval):
        return value
    mean = "geometric_mean" if name in ("time_to_target_s", "seconds_to_target") else "mean"
    return {mean: value.mean, "low": value.low, "high": value.high}


def csv_rows(job_tables: Sequence[JobTable]) -> list[dict[str, Any]]:
    """Return the rows of all jobs for one CSV table; a mean has three columns: NAME, NAME.low and NAME.high."""
    rows: list[dict[str, Any]] = []
    for table in job_tables:
        for row in table.rows:
            rows.append({"job": table.analysis.job.name})
            for name, (value, _) in row.items():
                rows[-1][name] = mean_of(value)
                if isinstance(value, Interval):
                    rows[-1] |= {f"{name}.low": value.low, f"{name}.high": value.high}
    return rows


def write_csv(rows: Sequence[Mapping[str, Any]], file: TextIO, lineterminator: str = "\n") -> None:
    writer = csv.DictWriter(
        file, list(dict.fromkeys(key for row in rows for key in row)), lineterminator=lineterminator
    )
    writer.writeheader()
    writer.writerows(rows)


def mean_of(value: Any) -> Any:
    return value.mean if isinstance(value, Interval) else value


def _heads(table: JobTable) -> dict[str, str]:
    """Return the heads of a table's columns; the time's has the target, and says which mean it is."""
    job = table.analysis.job
    # Names of metrics and settings belong to the user; others are broken into lines.
    heads = {n: _short(n) if "." in n else n.replace("_per_", "\n/").replace("_", "\n") for n in table.rows[0]}
    if job.target is not None:
        mean = ",\ngeometric mean" if any(len(group.seconds_to_target) > 1 for group in table.analysis.groups) else ""
        heads["time_to_target_s"] = f"seconds\nto {job.target:g}{mean}"
    return heads


def _title(analysis: Analysis) -> str:
    """Return a table's title: the job, how many runs there are, and what the values are."""
    job, failed = analysis.job, len(analysis.failures)
    text = f"{job.name or job.title}: {console.count(len(analysis.runs), 'run')}"
    text += f", {failed} without a result" if failed else ""
    text += ", on virtual ranks" if all(group.virtual for group in analysis.groups) else ""
    max_runs = max(len(group.ended) for group in analysis.groups)
    means = "means and 95 % intervals" if max_runs >= MIN_SEEDS else "means"
    return f"{text}; {f'{means} over the seeds' if max_runs > 1 else 'one run per group'}"


# --- the columns of a job ---------------------------------------------------------------------------------------------
def _rows(analysis: Analysis) -> list[dict[str, Entry]]:
    """Return a dict per group with all columns, the most important first."""
    groups = analysis.groups
    ended = [row for group in groups for row in group.rows if row["failure"] is None]
    columns = list(ended[0]) if ended else []
    numbers = [
        key for key in columns if key != "seed" and all(type(row[key]) in (int, float, type(None)) for row in ended)
    ]
    base = _speedup_base(groups)
    rows = [_row(group, columns, numbers, base) for group in groups]
    columns = list(rows[0]) if rows else []
    metrics = [name for name in columns if name.startswith("metric.") and name != "metric.loss"]
    metrics.sort(key=lambda name: name != f"metric.{analysis.job.metric}")
    order = [*BEFORE, *metrics[:1], *AFTER, *metrics[1:], *LAST]
    names = sorted(columns, key=lambda name: order.index(name) if name in order else len(order))
    return [{name: row[name] for name in names} for row in rows]


def _row(group: RunGroup, columns: Iterable[str], numbers: Sequence[str], base: RunGroup | None) -> dict[str, Entry]:
    """Return a group's entries by column: counts, rates, the speedup over `base`, and the `columns` of `runs.csv`."""
    runs, ended, reached = len(group.runs), len(group.ended), group.seconds_to_target
    has_times = base is not None and group.virtual == base.virtual and base.seconds and group.seconds
    speedup = ratio_of(base.seconds, group.seconds) if base is not None and has_times else None
    row: dict[str, Entry] = {
        "name": (group.name, group.display_name + " [baseline]" * (group.kind == "baseline")),
        "kind": (group.kind, group.kind),
        "virtual": (group.virtual, str(group.virtual).lower()),
        "ranks": (group.ranks, str(group.ranks)),
        "runs": (runs, f"{runs}" if ended == runs else f"{ended} of {runs}"),
        "ended": (ended, str(ended)),
        "samples_per_s": (rate := group.samples_per_s, wording.estimate(rate, "{:.0f}".format)),
        "speedup": (speedup, wording.times(speedup)),
    }
    if group.job.target is not None:
        note = f" ({len(reached)} of {group.n_started})" if 0 < len(reached) < group.n_started else ""
        text = wording.seconds_to_target(reached.values(), group.n_started) + note if group.n_started else wording.NONE
        row |= {"time_to_target_s": (group.mean_seconds_to_target, text), "reached": (len(reached), str(len(reached)))}
    for key in columns:
        if key not in row and key not in LEFT_OUT:
            row[key] = _number(group, key) if key in numbers else _text_entry(group, key)
    return row


def _number(group: RunGroup, key: str) -> Entry:
    """Return the entry of a numeric column: the mean (the maximum for staleness), and how many values are finite."""
    mean, finite = group.mean(key), len(group[key])
    if key == "staleness_max" and finite:
        return (largest := max(group[key].values())), wording.number(largest)
    if key.startswith("metric."):
        n_values = sum(value is not None for value in group.values(key))
        note = f" ({finite} of {n_values} finite)" if finite < n_values else ""
        return mean, f"{mean:.4f}{note}" if finite else "not finite" if n_values else wording.NONE
    write = wording.amount if key.startswith("bytes") else wording.number
    return mean, wording.NONE if mean is None else write(mean.mean)


def _text_entry(group: RunGroup, key: str) -> Entry:
    """Return the entry of a text column: the distinct values of the runs."""
    texts = list(dict.fromkeys(str(value) for value in group.values(key) if value is not None))
    return ", ".join(texts), ", ".join(texts) if len(texts) <= LISTED else f"{len(texts)} different"


def _speedup_base(groups: Sequence[RunGroup]) -> RunGroup | None:
    """Return the group that speedups are relative to: one rank, with the smallest batch."""
    candidates = [
        group for group in groups if group.ranks == 1 and group.kind != "baseline" and group.total_batch is not None
    ]
    several = any(group.ranks > 1 for group in groups)
    return min(candidates, key=lambda group: group.total_batch or 0) if candidates and several else None


# --- columns and rows that are chosen ---------------------------------------------------------------------------------
def _short(name: str) -> str:
    """Return a column's name without `metric.` or `setting.`."""
    return name.removeprefix("metric.").removeprefix("setting.")


def _is_default(name: str, rows: Sequence[Mapping[str, Entry]], job: JobRuns) -> bool:
    """Return whether a column is shown by default: it is important and holds information here."""
    if name in ("name", "ranks", f"metric.{job.metric}"):
        return True
    if (name not in (*BEFORE, *AFTER, *LAST) and not name.startswith("metric.")) or name == "metric.loss":
        return False
    return any(mean_of(row[name][0]) not in (None, 1 if name in BEFORE else 0) for row in rows)


def _sort_key(name: str, job: JobRuns, row: Mapping[str, Entry]) -> tuple[bool, float, str]:
    """Return the sort key of a row by a column: the best first, missing values last."""
    value, higher_is_better = mean_of(row[name][0]), name in HIGHER_IS_BETTER
    if name.startswith("metric."):
        higher_is_better = job.higher_is_better if _short(name) == job.metric else is_higher_better(_short(name))
    with suppress(TypeError, ValueError):  # a setting's text may be a number
        return False, float(value) * (-1 if higher_is_better else 1), ""
    return value is None, math.inf, str(value)


def _cut_prefix(texts: Sequence[str]) -> tuple[str, list[str]]:
    """Remove the common prefix of all texts, up to a separator; return the prefix and the shortened texts."""
    low, high = min(filter(None, texts), default=""), max(texts)  # in order: all others share their prefix, too
    common = low[: next((i for i, pair in enumerate(zip(low, high)) if pair[0] != pair[1]), 0)]
    common = common[: max(common.rfind(mark) for mark in SEPARATORS) + 1]
    if len(common) < LEAST_CUT:
        return "", list(texts)
    end = ")" if common.count("(") > common.count(")") and all(text.endswith(")") for text in texts) else ""
    return f"{common}…{end}", [text.replace(common, "").removesuffix(end) for text in texts]
