"""The table of a report: a row for each kind of run; the runs of a kind differ in their seeds."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TextIO

from hpcdist.errors import UnknownNameError
from hpcdist.tools import console
from hpcdist.tools.report import wording
from hpcdist.tools.report.evidence import Evidence, is_higher_better
from hpcdist.tools.report.findings import Cell, Findings, Seed
from hpcdist.tools.statistics import Effect, GeometricMean, Interval, ratio_of

# Columns that are shown without --columns if they say anything, the most important ones first: those before the metric,
# those behind it, and those behind all other metrics.
BEFORE = ("name", "ranks", "stages", "runs")
AFTER = ("time_to_target_s", "samples_per_s", "speedup", "wall_s")
LAST = ("staleness_mean", "staleness_max", "bytes_per_step", "waiting_s", "bubble", "joules", "skipped", "dropped")
HIGHER_IS_BETTER = ("samples_per_s", "speedup", "samples")
LEFT_OUT = ("job", "failure")  # of what a run has in `runs.csv`: the table's title tells them
LISTED = 3  # different texts of the runs of a kind; more are counted
SEPARATORS, LEAST_CUT = "/(=, ", 4  # behind which texts are cut, and by how many characters at least


@dataclass(frozen=True)
class KindColumn:
    """A column of the table.

    Attributes:
        name: for `--columns`, CSV and JSON: that of `runs.csv`, where it has a column for the same of each run.
        value: of a kind of run: a mean where its runs have numbers, a text, or a number; None if it is not known.
        text: what is shown of it on a terminal.
        is_text: its values are no numbers.
        head: what stands above it on a terminal.
    """

    name: str
    value: Callable[[Cell], Interval | GeometricMean | Effect | float | str | None]
    text: Callable[[Cell], str]
    is_text: bool = False
    higher_is_better: bool = False
    head: str = ""


@dataclass(frozen=True)
class JobTable:
    """The table on one job: its kinds of runs, one in each row, and its columns."""

    findings: Findings
    cells: Sequence[Cell]
    columns: Sequence[KindColumn]


def tables(
    jobs: Sequence[Findings], names: Sequence[str] | None = None, sort: str | None = None, *, every: bool = False
) -> list[JobTable]:
    """Make a table for each job.

    Args:
        names: of the columns, without `metric.` and `setting.`, too; None: those that matter most, or all if `every`.
        sort: the column that rows are sorted by, the best first; None: by ranks, kind and name.

    Raises:
        UnknownNameError: no job has such a column.
    """
    of_jobs = [{column.name: column for column in _columns(findings)} for findings in jobs]
    known = {_short(name): name for columns in reversed(of_jobs) for name in reversed(columns)}

    def named(option: str, name: str) -> str:
        if _short(name) not in known:
            raise UnknownNameError(option, name, known)
        return known[_short(name)]

    wanted = None if names is None else [named("--columns", name) for name in names]
    key = None if sort is None else named("--sort", sort)
    found = []
    for findings, columns in zip(jobs, of_jobs, strict=True):
        chosen = [name for name in columns if every or _is_shown(columns[name], findings)] if wanted is None else wanted
        cells = list(findings.cells)
        if key in columns:
            cells.sort(key=partial(_place, columns[key]))
        found.append(JobTable(findings, cells, [columns[name] for name in chosen if name in columns]))
    return found


def show(found: Sequence[JobTable]) -> None:
    """Show tables on the terminal, or write them to the file that standard output is."""
    for table in found:
        heads = {column.name: column.head or _head(column.name) for column in table.columns}
        texts = {column.name: [column.text(cell) for cell in table.cells] for column in table.columns}
        left = [column.name for column in table.columns if column.is_text]
        for name in left:
            common, texts[name] = _cut(texts[name])
            heads[name] += f"\n{common}" if common else ""
        rows = [dict(zip(texts, row)) for row in zip(*texts.values())]
        console.rows(_title(table.findings), rows, heads=heads, left=left, option="--columns")


def as_data(found: Sequence[JobTable]) -> list[dict[str, Any]]:
    """Return tables for JSON, with numbers that are not rounded: means have the ends of their 95 % intervals."""
    asked = ("job", "title", "metric", "higher_is_better", "target", "reference")
    return [
        {key: getattr(table.findings.evidence, key) for key in asked}
        | {"rows": [{column.name: as_value(column.value(cell)) for column in table.columns} for cell in table.cells]}
        for table in found
    ]


def write_csv(found: Sequence[JobTable], file: TextIO) -> None:
    """Write the tables of all jobs as one, in which a mean has three columns: NAME, NAME.low and NAME.high."""
    rows = []
    for table in as_data(found):
        for row in table["rows"]:
            flat = {"job": table["job"]}
            for name, value in row.items():
                parts = value if isinstance(value, dict) else {"": value}
                flat |= {f"{name}.{end}" if end in ("low", "high") else name: part for end, part in parts.items()}
            rows.append(flat)
    writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _head(name: str) -> str:
    """Write a column's name in several lines, but for names of metrics and settings, which are the user's."""
    return _short(name) if "." in name else name.replace("_per_", "\n/").replace("_", "\n")


def as_value(value: object) -> object:
    """Return a value for JSON: of a mean its number and the ends of its interval."""
    if isinstance(value, GeometricMean):
        return asdict(value)
    if isinstance(value, (Interval, Effect)):
        return {"mean": value.mean, "low": value.low, "high": value.high}
    return value


def _title(findings: Findings) -> str:
    evidence, failed = findings.evidence, len(findings.failures)
    said = f"{evidence.job or evidence.title}: {wording.count(len(evidence.runs), 'run')}"
    said += f", {failed} without a result" if failed else ""
    said += ", on virtual ranks" if all(cell.virtual for cell in findings.cells) else ""
    several = any(len(cell.ended) > 1 for cell in findings.cells)
    return f"{said}; {'means and 95 % intervals over the seeds' if several else 'one run of each kind'}"


# --- the columns of a job ---------------------------------------------------------------------------------------------
def _columns(findings: Findings) -> list[KindColumn]:
    """List all columns of a job, the most important ones first."""
    evidence, cells = findings.evidence, findings.cells
    found = [
        KindColumn("name", lambda cell: cell.name, _name, is_text=True),
        KindColumn("kind", lambda cell: cell.kind, lambda cell: cell.kind, is_text=True),
        KindColumn("virtual", lambda cell: cell.virtual, lambda cell: str(cell.virtual).lower(), is_text=True),
        _number("ranks", lambda cell: cell.ranks, str),
        KindColumn("runs", lambda cell: len(cell.runs), _runs),
        _number("ended", lambda cell: len(cell.ended), str),
        _number("samples_per_s", lambda cell: cell.samples_per_s, "{:.0f}".format),
        _number("speedup", partial(_speedup, _alone(cells)), wording.times),
    ]
    if evidence.target is not None:
        several = ",\ngeometric mean" if any(len(cell.seconds_to_target) > 1 for cell in cells) else ""
        head = f"seconds\nto {evidence.target:g}{several}"
        found.append(KindColumn("time_to_target_s", lambda cell: cell.mean_seconds_to_target, _to_target, head=head))
        found.append(_number("reached", lambda cell: len(cell.seconds_to_target), str))
    rows, known = [row for cell in cells for row in cell.rows.values()], {column.name for column in found}
    for key in dict.fromkeys(key for row in rows for key in row if key not in known and key not in LEFT_OUT):
        values = [row[key] for row in rows if row.get(key) is not None]
        is_number = key != "seed" and all(type(value) in (int, float) for value in values)
        found.append(_mean(key, evidence) if is_number else _listed(key))
    metrics = [column.name for column in found if column.name.startswith("metric.") and column.name != "metric.loss"]
    metrics.sort(key=lambda name: name != f"metric.{evidence.metric}")
    order = [*BEFORE, *metrics[:1], *AFTER, *metrics[1:], *LAST]
    return sorted(found, key=lambda column: order.index(column.name) if column.name in order else len(order))


def _number(
    name: str, value: Callable[[Cell], Any], write: Callable[[Any], str], *, higher_is_better: bool | None = None
) -> KindColumn:
    def text(cell: Cell) -> str:
        return wording.NONE if (found := value(cell)) is None else write(found)

    higher = name in HIGHER_IS_BETTER if higher_is_better is None else higher_is_better
    return KindColumn(name, value, text, higher_is_better=higher)


def _mean(key: str, evidence: Evidence) -> KindColumn:
    """Make the column of a number that each run has, by its name in `runs.csv`."""
    if key == "staleness_max":
        return _number(key, lambda cell: max(cell[key].values(), default=None), wording.number)
    name = key.removeprefix("metric.")
    if name == key:
        write = wording.amount if key.startswith("bytes") else wording.number
        return _number(key, lambda cell: cell.mean(key), lambda mean: write(mean.mean))
    higher = evidence.higher_is_better if name == evidence.metric else is_higher_better(name)

    def text(cell: Cell) -> str:
        finite, known = cell[key], sum(row.get(key) is not None for row in cell.rows.values())
        some = f" ({len(finite)} of {known} finite)" if len(finite) < known else ""
        return f"{cell.mean(key):.4f}{some}" if finite else "not finite" if known else wording.NONE

    return KindColumn(key, lambda cell: cell.mean(key), text, higher_is_better=higher)


def _listed(key: str) -> KindColumn:
    """Make the column of what is no measurement: the different texts of a kind's runs."""

    def texts(cell: Cell) -> list[str]:
        return list(dict.fromkeys(str(row[key]) for row in cell.rows.values() if row.get(key) is not None))

    def text(cell: Cell) -> str:
        found = texts(cell)
        return ", ".join(found) if len(found) <= LISTED else f"{len(found)} different"

    return KindColumn(key, lambda cell: ", ".join(texts(cell)), text, is_text=True)


# --- what is in a column ----------------------------------------------------------------------------------------------
def _name(cell: Cell) -> str:
    return cell.shown + " [baseline]" * (cell.kind == "baseline")


def _runs(cell: Cell) -> str:
    return str(len(cell.runs)) if len(cell.ended) == len(cell.runs) else f"{len(cell.ended)} of {len(cell.runs)}"


def _to_target(cell: Cell) -> str:
    """Write the times of the runs that reached the target, and how many did where that is not all."""
    reached = cell.seconds_to_target.values()
    some = f" ({len(reached)} of {cell.tried})" if 0 < len(reached) < cell.tried else ""
    return wording.seconds_to_target(reached, cell.tried) + some if cell.tried else wording.NONE


def _costs(cell: Cell) -> dict[Seed, float]:
    """Return the seconds of each run to the target, or without one those of a sample; empty where a run lacks them."""
    if cell.evidence.target is None:
        return cell.seconds_per_sample
    return cell.seconds_to_target if cell.all_reached else {}


def _alone(cells: Sequence[Cell]) -> Cell | None:
    """Return what speed-ups are over: one rank with the batch of one rank, which is the smallest."""
    found = [cell for cell in cells if cell.ranks == 1 and cell.kind != "baseline" and cell.total_batch is not None]
    several = any(cell.ranks > 1 for cell in cells)
    return min(found, key=lambda cell: cell.total_batch or 0) if found and several else None


def _speedup(alone: Cell | None, cell: Cell) -> Effect | None:
    if alone is None or cell.virtual != alone.virtual or not _costs(alone) or not _costs(cell):
        return None
    return ratio_of(_costs(alone), _costs(cell))


# --- columns and rows that are chosen ---------------------------------------------------------------------------------
def _short(name: str) -> str:
    """Return a column's name without the group that it is of."""
    return name.removeprefix("metric.").removeprefix("setting.")


def _is_shown(column: KindColumn, findings: Findings) -> bool:
    """Tell whether a column is one of those that matter, and says anything here."""
    if column.name in ("name", "ranks", f"metric.{findings.evidence.metric}"):
        return True
    if column.name not in (*BEFORE, *AFTER, *LAST) and not column.name.startswith("metric."):
        return False
    nothing = (None, 1 if column.name in BEFORE else 0)
    return column.name != "metric.loss" and any(_mean_of(column.value(cell)) not in nothing for cell in findings.cells)


def _place(column: KindColumn, cell: Cell) -> tuple[bool, float, str]:
    """Return the key that sorts a cell by a column: the best first, what is not known last."""
    value = _mean_of(column.value(cell))
    with suppress(TypeError, ValueError):  # a setting's text may be a number
        return False, float(value) * (-1 if column.higher_is_better else 1), ""
    return value is None, math.inf, str(value)


def _mean_of(value: Any) -> Any:
    if isinstance(value, GeometricMean):
        return value.geometric_mean
    return value.mean if isinstance(value, (Interval, Effect)) else value


def _cut(texts: Sequence[str]) -> tuple[str, list[str]]:
    """Cut what all texts begin with, up to a separator, wherever it stands; return that, and what is left of each."""
    low, high = min(filter(None, texts), default=""), max(texts)
    common = low[: next((i for i, pair in enumerate(zip(low, high)) if pair[0] != pair[1]), 0)]
    common = common[: max(common.rfind(mark) for mark in SEPARATORS) + 1]
    if len(common) < LEAST_CUT:
        return "", list(texts)
    end = ")" if common.count("(") > common.count(")") and all(text.endswith(")") for text in texts) else ""
    return f"{common}…{end}", [text.replace(common, "").removesuffix(end) for text in texts]
