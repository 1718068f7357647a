"""Write a report: a page that needs nothing beside it; figures as SVG, PDF and PNG; every number as CSV and JSON."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from html import escape
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jinja2
from markupsafe import Markup
from pandas import DataFrame
from pydantic_core import to_json

from hpcdist.errors import require_packages
from hpcdist.records import local_cores_of_host, now, writing
from hpcdist.registry import catalogue
from hpcdist.tools.report import wording
from hpcdist.tools.report.analysis import Analysis, analyse
from hpcdist.tools.report.methods import methods
from hpcdist.tools.report.results import JobRuns, Progress, read_jobs
from hpcdist.tools.report.table import as_value, asked_of
from hpcdist.tools.report.verdict import Verdict, judge
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

    Columns are the run's `job` and `comparison` (or sweep; the folder), its cell (`name`, `kind`, `ranks`, `virtual`),
    `seed`, `folder` and `failure`; its cost
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
    only: Collection[Path] | None = None,
    progress: Progress = lambda items, title: items,
) -> Path:
    """Write the report on a comparison's folder, a sweep's, or any folders with these and single runs; return the page.

    Args:
        output: folder for `index.html`, `figures`, `runs.csv` and `runs.json`; None is `report` in the first folder.
        target: a metric and the value to be reached, where no comparison names them.
        only: the runs' folders, see `read_jobs`; None: all.
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
    page = output / "index.html"
    with warnings.catch_warnings(), matplotlib.style.context(["default", STYLE]), writing(page):
        # In names. A browser has them; only in the PNG and PDF files there is a box.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        jobs = list(map(analyse, read_jobs(folders, target, only=only)))
        page.write_text(_page(jobs, ", ".join(map(str, folders)), output, progress), "utf-8")
    return page


def _page(jobs: Sequence[Analysis], title: str, output: Path, progress: Progress) -> str:
    """Write the figures and the numbers of jobs; return the page on them."""
    runs = [one for analysis in jobs for one in analysis.job.runs]
    for one in progress(runs, "reading steps"):
        one.curves  # noqa: B018 - they are read on first use
    parts = [_part(analysis, f"part-{number}-" * (number > 1)) for number, analysis in enumerate(jobs, 1)]
    drawn = _write_figures(output, [section for part in parts for section in part["sections"]], progress)
    rows = [row for analysis in jobs for row in analysis.rows]
    with open(output / "runs.csv", "w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    of_jobs = [numbers(analysis, part["verdict"]) | part["numbers"] for analysis, part in zip(jobs, parts)]
    content = {"version": VERSION, "jobs": of_jobs}
    (output / "runs.json").write_bytes(to_json(content, indent=1, inf_nan_mode="null"))
    own = jobs[0].job.title
    own = Path(own).name if own.endswith(".py") else own
    return _render(
        f"{parts[0]['question']} {own}" if len(jobs) == 1 else f"Runs in {title}",
        parts=parts,
        drawn=drawn,
    )


def _part(analysis: Analysis, prefix: str) -> dict[str, Any]:
    """Draw the part of the page on a job.

    Args:
        prefix: of the names of sections and figures, which are unique in a page with several parts.
    """
    job = analysis.job
    if job.is_sweep:
        from hpcdist.tools.report.sweep import judge_sweep, read_sweep
        from hpcdist.tools.report.sweep_page import facts_of_sweep, sections_of_sweep

        found = read_sweep(cast(Path, job.comparison))
        part: dict[str, Any] = {
            "question": "Which settings?",
            "facts": facts_of_sweep(found),
            "verdict": judge_sweep(found),
        }
        part |= {"sections": sections_of_sweep(found), "numbers": {"sweep": found}}
    else:
        part = {"question": "Which strategy?", "facts": _facts(job), "verdict": judge(analysis)}
        part |= {"sections": sections_of(analysis), "numbers": {}}
    part["sections"] = [one.prefixed(prefix) for one in part["sections"]]
    part["methods"] = text = methods(analysis)
    part["numbers"] |= {"methods": text}
    virtual = {one.virtual for one in job.runs}
    part["virtual"] = "" if True not in virtual else "some" if False in virtual else "all"
    return part | {"name": job.section, "runs": len(job.runs), "prefix": prefix}


def _write_figures(output: Path, sections: Sequence[Section], progress: Progress) -> dict[str, str]:
    """Write all figures, several at a time; return them as elements of the page, by their names."""
    figures = [figure for section in sections for of in section.figures.values() for figure in of]
    (folder := output / "figures").mkdir(parents=True, exist_ok=True)
    # The copies that a fork makes have the figures already, which would take longer to send than to draw.
    context, (_, cores) = get_context("fork"), local_cores_of_host()
    with warnings.catch_warnings(), ProcessPoolExecutor(min(len(cores), 8), context, _drawn.extend, (figures,)) as pool:
        # Those threads show progress, or compute, and do not draw.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        drawn = [pool.submit(_write_figure, number, folder) for number in range(len(figures))]
        return {figures[number].name: drawn[number].result() for number in progress(range(len(figures)), "drawing")}


_drawn: list[ReportFigure] = []  # by a process of `_write_figures`


def _write_figure(number: int, folder: Path) -> str:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf

    from hpcdist.tools.report.figures.base import svg

    figure = _drawn[number]
    text = svg(figure)
    head, title, rest = text.partition("<title")
    (folder / f"{figure.name}.svg").write_text(head + STANDALONE + title + rest, "utf-8")
    with rc_context({"pdf.fonttype": 42}):  # TrueType, which journals ask for
        FigureCanvasPdf(figure.figure).print_pdf(folder / f"{figure.name}.pdf", metadata={"CreationDate": None})
    figure.figure.set(dpi=150, facecolor="white")
    FigureCanvasAgg(figure.figure).print_png(folder / f"{figure.name}.png")  # savefig would draw it twice
    return text


# --- the page ---------------------------------------------------------------------------------------------------------
def sections_of(analysis: Analysis) -> list[Section]:
    """Draw all sections that have something to show, in their order; those of other packages last."""
    from hpcdist.tools.report.figures.base import ReportFigure, ReportTable, Section

    sections = []
    kinds = catalogue("figures")
    plugins = [(name, kinds.load(name)) for name in kinds.available()]
    for name, plugin in sorted(plugins, key=lambda one: (getattr(one[1], "ORDER", len(plugins)), one[0])):
        parts = list(plugin.draw(analysis))
        figures: dict[int | None, list[ReportFigure]] = {}
        for part in parts:
            if isinstance(part, ReportFigure):
                figures.setdefault(part.ranks, []).append(part)
        tables = [part for part in parts if isinstance(part, ReportTable)]
        remarks = [part for part in parts if isinstance(part, str)]
        if parts:
            sections.append(Section(name, getattr(plugin, "TITLE", name), figures, tables, remarks))
    return sections


def _render(title: str, *, parts: Sequence[Mapping[str, Any]], drawn: Mapping[str, str]) -> str:
    """Render the page.

    Args:
        parts: as `_part` returns them.
        drawn: their figures, by their names.
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
        title=title,
        parts=parts,
        drawn=drawn,
        shown_reasons=SHOWN_REASONS,
        shown_rows=SHOWN_ROWS,
        written=now(),
        version=__version__,
    )


def _facts(job: JobRuns) -> dict[str, str]:
    """List what was asked, for the page's head."""
    runs, better = [one.run for one in job.runs], "higher" if job.higher_is_better else "lower"
    target = wording.NONE if job.target is None else wording.value(job.metric, job.target)
    found = {"metric": f"{job.metric} ({better} is better)", "target": target}
    if job.budget:
        found["budget"] = ", ".join(f"{wording.number(v)} {unit}" for unit, v in job.budget.items())
    found["held against"] = f"`{job.reference}`"
    found["runs"] = f"{sum(run.ended for run in runs)} of {len(runs)} ended"
    if days := sorted({run.start.started[:10] for run in runs if run.start}):
        found["made"] = " to ".join(dict.fromkeys((days[0], days[-1])))
    return found


# --- the numbers ------------------------------------------------------------------------------------------------------
def numbers(analysis: Analysis, verdict: Verdict) -> dict[str, Any]:
    """Collect all numbers on a job for JSON: runs with their curves, cells, contrasts, scaling, and the verdict."""
    return {
        **asked_of(analysis.job),
        "budget": analysis.job.budget,
        "verdict": verdict,
        "cells": [
            {key: getattr(group, key) for key in ("label", "name", "kind", "ranks", "virtual", "staleness")}
            | {"runs": len(group.runs), "ended": len(group.ended), "reached": len(group.seconds_to_target)}
            | {"final": as_value(group.final_mean)}
            | {"seconds_to_target": as_value(group.mean_seconds_to_target, "seconds_to_target")}
            | {"seconds_by_rank": group.times.to_dict("index")}
            for group in analysis.groups
        ],
        "contrasts": [
            {
                "cell": contrast.group.label,
                "reference": contrast.reference.label,
                "times_sooner": contrast.sooner,
                "times_sooner_p_corrected": contrast.p_sooner,
                "metric_difference": contrast.better,
                "metric_difference_p_corrected": contrast.p_better,
                "why_no_ratio": contrast.why,
            }
            for contrast in analysis.contrasts
        ],
        "scaling": [
            {"kind": row.kind, "speedup": row.speedup, "efficiency": row.efficiency}
            | {"cell": row.group.label, "base": row.base.label}
            for row in analysis.scaling
        ],
        "runs": analysis.rows,
        "curves": {
            str(one.run.folder): {
                "losses": _points(one.curves.losses),
                "evaluations": _points(one.curves.evaluations.drop(columns=["step", "epoch", "joules"])),
            }
            for one in analysis.job.runs
        },
    }


def _points(frame: DataFrame) -> list[dict[str, Any]]:
    return frame.rename(columns=lambda name: name.removeprefix("metric.")).to_dict("records")
