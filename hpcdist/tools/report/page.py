"""Write a report: a page that needs nothing beside it, every figure as SVG and PNG, every number as CSV and JSON."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from html import escape
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup
from pandas import DataFrame
from pydantic_core import to_json

from hpcdist.errors import require_packages
from hpcdist.records import now, own_cores, writing
from hpcdist.registry import catalogue
from hpcdist.tools.report import wording
from hpcdist.tools.report.evidence import Progress, read_jobs
from hpcdist.tools.report.findings import Cell, Findings, analyse
from hpcdist.tools.report.table import as_value
from hpcdist.tools.report.verdict import Verdict, judge
from hpcdist.tools.runs import SWEEP
from hpcdist.version import __version__

if TYPE_CHECKING:
    from hpcdist.tools.report.figures.base import ReportFigure, Section

TEMPLATE = "template.html.j2"
VERSION = 2  # of runs.json
SHOWN_REASONS = SHOWN_ROWS = 8  # the others are folded; so are longer tables, but for those of the answer
# Of a figure in a file of its own: light or dark as its reader's system is.
STANDALONE = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3;background:#0f1419}}</style>"


def read_runs(folder: str | Path) -> DataFrame:
    """Read all runs of a folder into a pandas frame, a row each: those that failed, too.

    Columns are the run's `job` and cell (`name`, `kind`, `ranks`, `virtual`), `seed`, `folder` and `failure`; its cost
    (`wall_s`, `samples`, `bytes_per_step`, ...); `metric.NAME` at the end; `time_to_target_s` and the like where a
    comparison has a target; and `setting.KEY` for the settings in which runs differ.

    Raises:
        ConfigError: there is no run.
        DataError: a file is damaged.
    """
    return DataFrame([row for job in read_jobs([Path(folder)]) for row in analyse(job).rows])


def write(
    folder: Path | Sequence[Path],
    output: Path | None = None,
    *,
    target: tuple[str, float] | None = None,
    progress: Progress = lambda items, title: items,
) -> Path:
    """Write the report on a comparison's folder, or on any folders of runs; return the page.

    Args:
        output: folder for `index.html`, `figures`, `runs.csv` and `runs.json`; None is `report` in the first folder.
        target: a metric and the value to be reached, where no comparison names them.
        progress: is given what takes a while, see `read_jobs`.

    Raises:
        ConfigError: there is no run, or matplotlib is not installed.
        DataError: a file is damaged.
        OutputError: a file can't be written.
    """
    require_packages("a report", "plots", "matplotlib")
    import matplotlib.style

    from hpcdist.tools.report.figures.base import STYLE

    folders = [folder] if isinstance(folder, Path) else list(folder)
    output = folders[0] / "report" if output is None else output
    if len(folders) == 1 and (folders[0] / SWEEP).exists():
        return _write_sweep(folders[0], output)
    jobs = [analyse(job) for job in read_jobs(folders, target)]
    verdicts = list(map(judge, jobs))
    for one in progress([one for findings in jobs for one in findings.evidence.runs], "reading steps"):
        one.curves  # noqa: B018 - they are read on first use
    page = output / "index.html"
    with warnings.catch_warnings(), matplotlib.style.context(["default", STYLE]), writing(page):
        # In names. A browser has them; only in the PNG files there is a box.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        sections = [
            _unique(sections_of(findings), i) if i else sections_of(findings) for i, findings in enumerate(jobs)
        ]
        drawn = _write_figures(output, [section for of_job in sections for section in of_job], progress)
        rows = [row for findings in jobs for row in findings.rows]
        with open(output / "runs.csv", "w", newline="", encoding="utf-8") as lines:
            writer = csv.DictWriter(lines, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)
        content = {"version": VERSION, "jobs": list(map(numbers, jobs, verdicts))}
        (output / "runs.json").write_bytes(to_json(content, indent=1, inf_nan_mode="null"))
        told = [
            {"name": findings.evidence.job or "jobs that are not written down", "facts": _facts(findings)}
            | {"verdict": verdict, "sections": of_job, "runs": len(findings.evidence.runs)}
            for findings, verdict, of_job in zip(jobs, verdicts, sections, strict=True)
        ]
        virtual = [one.virtual for findings in jobs for one in findings.evidence.runs]
        text = _render("Which strategy?", jobs[0].evidence.title, told, drawn, ["runs.csv", "runs.json"], virtual)
        page.write_text(text, "utf-8")
    return page


def _write_figures(output: Path, sections: Sequence[Section], progress: Progress) -> dict[str, str]:
    """Write all figures, several at a time; return them as elements of the page, by their names."""
    figures = [figure for section in sections for of in section.figures.values() for figure in of]
    (folder := output / "figures").mkdir(parents=True, exist_ok=True)
    # The copies that a fork makes have the figures already, which would take longer to send than to draw.
    context, (_, cores) = get_context("fork"), own_cores()
    with warnings.catch_warnings(), ProcessPoolExecutor(min(len(cores), 8), context, _drawn.extend, (figures,)) as pool:
        # Those threads show progress, or compute, and do not draw.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        drawn = [pool.submit(_write_figure, number, folder) for number in range(len(figures))]
        return {figures[number].name: drawn[number].result() for number in progress(range(len(figures)), "drawing")}


_drawn: list[ReportFigure] = []  # by a process of `_write_figures`


def _write_figure(number: int, folder: Path) -> str:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from hpcdist.tools.report.figures.base import svg

    figure = _drawn[number]
    text = svg(figure)
    head, title, rest = text.partition("<title")
    (folder / f"{figure.name}.svg").write_text(head + STANDALONE + title + rest, "utf-8")
    figure.figure.set(dpi=150, facecolor="white")
    FigureCanvasAgg(figure.figure).print_png(folder / f"{figure.name}.png")  # savefig would draw it twice
    return text


def _write_sweep(folder: Path, output: Path) -> Path:
    """Write the page on a sweep, with its figures and `sweep.json`; return the page."""
    import matplotlib.style

    from hpcdist.tools.report.figures.base import STYLE
    from hpcdist.tools.report.sweep import judge_sweep, read_sweep, sections_of_sweep

    found, page = read_sweep(folder), output / "index.html"
    with matplotlib.style.context(["default", STYLE]), writing(page):
        sections = sections_of_sweep(found)
        drawn = _write_figures(output, sections, lambda items, title: items)
        content = {"version": VERSION, **found.model_dump()}
        (output / SWEEP).write_bytes(to_json(content, indent=1, inf_nan_mode="null"))
        better = "higher" if found.higher_is_better else "lower"
        facts = {
            "metric": f"{found.metric} ({better} is better)",
            "strategy": f"`{found.strategy}` on {wording.count(found.ranks, 'rank')}",
            "sampler": found.sampler,
            "pruner": found.pruner,
            "trials": f"{len(found.complete)} of {len(found.trials)} with the whole budget",
        }
        job = {"name": found.job, "facts": facts, "verdict": judge_sweep(found), "sections": sections}
        text = _render("Which settings?", found.job, [job | {"runs": len(found.trials)}], drawn, [SWEEP])
        page.write_text(text, "utf-8")
    return page


# --- the page ---------------------------------------------------------------------------------------------------------
def sections_of(findings: Findings) -> list[Section]:
    """Draw all sections that have something to show, in their order; those of other packages last."""
    from hpcdist.tools.report.figures.base import ReportFigure, ReportTable, Section

    sections = []
    kinds = catalogue("figures")
    plugins = [(name, kinds.load(name)) for name in kinds.available()]
    for name, plugin in sorted(plugins, key=lambda one: (getattr(one[1], "ORDER", len(plugins)), one[0])):
        parts = list(plugin.draw(findings))
        figures: dict[int | None, list[ReportFigure]] = {}
        for part in parts:
            if isinstance(part, ReportFigure):
                figures.setdefault(part.ranks, []).append(part)
        tables = [part for part in parts if isinstance(part, ReportTable)]
        remarks = [part for part in parts if isinstance(part, str)]
        if parts:
            sections.append(Section(name, getattr(plugin, "TITLE", name), figures, tables, remarks))
    return sections


def _unique(sections: Sequence[Section], job: int) -> list[Section]:
    """Give names that are unique in a page with several jobs to a job's sections and figures."""
    return [
        replace(
            section,
            name=f"job-{job + 1}-{section.name}",
            figures={
                ranks: [replace(one, name=f"job-{job + 1}-{one.name}") for one in of_ranks]
                for ranks, of_ranks in section.figures.items()
            },
        )
        for section in sections
    ]


def _render(
    question: str,
    title: str,
    jobs: Sequence[Mapping[str, Any]],
    drawn: Mapping[str, str],
    files: Sequence[str],
    virtual: Sequence[bool] = (),
) -> str:
    """Render the page.

    Args:
        jobs: each with `name`, `facts`, `verdict`, `sections` and the number of its `runs`.
        drawn: its figures, by their names.
        files: beside it, with its numbers.
        virtual: whether each run was on virtual ranks.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Names in backquotes are code.
    environment.filters["code"] = lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text)))
    environment.tests["number"] = lambda text: re.match(r"[−+<\d–]", text) is not None
    return environment.get_template(TEMPLATE).render(
        question=question,
        title=Path(title).name if title.endswith(".py") else title,
        jobs=jobs,
        drawn=drawn,
        files=files,
        shown_reasons=SHOWN_REASONS,
        shown_rows=SHOWN_ROWS,
        virtual="all" if virtual and all(virtual) else "some" if any(virtual) else "",
        written=now(),
        version=__version__,
    )


def _facts(findings: Findings) -> dict[str, str]:
    """List what was asked, for the page's head."""
    evidence, runs = findings.evidence, [one.run for one in findings.evidence.runs]
    better = "higher" if evidence.higher_is_better else "lower"
    target = wording.NONE if evidence.target is None else wording.value(evidence.metric, evidence.target)
    found = {"metric": f"{evidence.metric} ({better} is better)", "target": target}
    if evidence.budget:
        found["budget"] = ", ".join(f"{wording.number(v)} {unit}" for unit, v in evidence.budget.items())
    found["held against"] = f"`{evidence.reference}`"
    found["runs"] = f"{sum(run.ended for run in runs)} of {len(runs)} ended"
    if days := sorted({run.start.started[:10] for run in runs if run.start}):
        found["made"] = " to ".join(dict.fromkeys((days[0], days[-1])))
    return found


# --- the numbers ------------------------------------------------------------------------------------------------------
def numbers(findings: Findings, verdict: Verdict) -> dict[str, Any]:
    """Collect all numbers on a job for JSON: runs with their curves, cells, contrasts, scaling, and the verdict."""
    evidence = findings.evidence
    asked = ("job", "title", "metric", "higher_is_better", "target", "budget", "reference")
    return {
        **{key: getattr(evidence, key) for key in asked},
        "verdict": verdict,
        "cells": [_cell(cell) for cell in findings.cells],
        "contrasts": [
            {
                "cell": contrast.cell.label,
                "reference": contrast.reference.label,
                "times_sooner": contrast.sooner,
                "times_sooner_p_corrected": contrast.p_sooner,
                "metric_difference": contrast.better,
                "metric_difference_p_corrected": contrast.p_better,
                "why_no_ratio": contrast.why,
            }
            for contrast in findings.contrasts
        ],
        "scaling": [
            {key: getattr(row, key) for key in ("kind", "speedup", "efficiency")}
            | {"cell": row.cell.label, "base": row.base.label}
            for row in findings.scaling
        ],
        "runs": findings.rows,
        "curves": {
            str(one.run.folder): {
                "losses": _points(one.curves.losses),
                "evaluations": _points(one.curves.evaluations.drop(columns=["step", "epoch", "joules"])),
            }
            for one in evidence.runs
        },
    }


def _points(frame: DataFrame) -> list[dict[str, Any]]:
    return frame.rename(columns=lambda name: name.removeprefix("metric.")).to_dict("records")


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        **{key: getattr(cell, key) for key in ("label", "name", "kind", "ranks", "virtual")},
        "runs": len(cell.runs),
        "ended": len(cell.ended),
        "reached": len(cell.seconds_to_target),
        "final": as_value(cell.final_mean),
        "seconds_to_target": cell.mean_seconds_to_target,
        "staleness": cell.staleness,
        "seconds_by_rank": cell.times.to_dict("index"),
    }
