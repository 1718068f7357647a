"""Write a report: a self-contained web page, its figures as SVG, PDF and PNG, and all numbers as CSV and JSON."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Sequence
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
from hpcdist.tools.report.results import Progress, read_jobs
from hpcdist.tools.report.table import as_value, criteria_of, write_csv
from hpcdist.tools.report.verdict import Verdict, judge
from hpcdist.version import __version__

if TYPE_CHECKING:
    from hpcdist.tools.report.figures.base import ReportFigure, Section

TEMPLATE = "template.html.j2"
VERSION = 2  # of runs.json
SHOWN_REASONS = SHOWN_ROWS = 8  # the others are folded, as are longer tables in other sections
# Of a figure in a separate file: light or dark, as the reader's system prefers.
STANDALONE = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3;background:#0f1419}}</style>"


def read_runs(folder: str | Path) -> DataFrame:
    """Read all runs of a folder into a pandas frame, one row each; runs without a result included.

    Columns: `job` and `comparison` (or sweep; its folder); the group (`name`, `kind`, `ranks`, `virtual`); `seed`,
    `folder` and `failure`; costs (`wall_s`, `samples`, `bytes_per_step`...); `metric.NAME` at the end; with a target
    `time_to_target_s`, `samples_to_target`...; and `setting.KEY` for settings that differ between runs.

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
    """Write the report on a comparison, a sweep, or any folders with runs in them; return the path of its page.

    Args:
        output: folder for `index.html`, `figures`, `runs.csv` and `runs.json`; None: `report` in the first folder.
        target: a metric and the value to reach, unless a comparison defines one.
        only: folders of the runs to read, see `read_jobs`; None: all.
        progress: progress display, see `read_jobs`.

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
        # Names may have other letters: browsers draw them, PNG and PDF files show a box.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        jobs = list(map(analyse, read_jobs(folders, target, only=only)))
        page.write_text(_page(jobs, ", ".join(map(str, folders)), output, progress), "utf-8")
    return page


def _page(jobs: Sequence[Analysis], title: str, output: Path, progress: Progress) -> str:
    """Write the figures and the numbers of all jobs; return the page's HTML."""
    runs = [result for analysis in jobs for result in analysis.job.runs]
    for result in progress(runs, "reading steps"):
        result.curves  # noqa: B018 - read on first use
    parts = [_part(analysis, f"part-{number}-" * (number > 1)) for number, analysis in enumerate(jobs, 1)]
    drawn = _write_figures(output, [section for part in parts for section in part["sections"]], progress)
    rows = [row for analysis in jobs for row in analysis.rows]
    with open(output / "runs.csv", "w", newline="", encoding="utf-8") as csv_file:
        write_csv(rows, csv_file, "\r\n")
    numbers_by_job = [numbers(analysis, part["verdict"]) | part["numbers"] for analysis, part in zip(jobs, parts)]
    content = {"version": VERSION, "jobs": numbers_by_job}
    (output / "runs.json").write_bytes(to_json(content, indent=1, inf_nan_mode="null"))
    name = jobs[0].job.title
    name = Path(name).name if name.endswith(".py") else name
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
        title=f"{parts[0]['question']} {name}" if len(jobs) == 1 else f"Runs in {title}",
        parts=parts,
        drawn=drawn,
        shown_reasons=SHOWN_REASONS,
        shown_rows=SHOWN_ROWS,
        written=now(),
        version=__version__,
    )


def _part(analysis: Analysis, prefix: str) -> dict[str, Any]:
    """Draw the part of the page about a job; return its variables for the template, and its `numbers` for JSON.

    `prefix` makes the names of sections and figures unique in the page.
    """
    job = analysis.job
    if job.is_sweep:
        from hpcdist.tools.report.sweep import judge_sweep, read_sweep
        from hpcdist.tools.report.sweep_page import facts_of_sweep, sections_of_sweep

        swept = read_sweep(cast(Path, job.comparison))
        question, facts, verdict = "Which settings?", facts_of_sweep(swept), judge_sweep(swept)
        sections, of_sweep = sections_of_sweep(swept), {"sweep": swept}
    else:
        question, facts, verdict = "Which strategy?", _facts(analysis), judge(analysis)
        sections, of_sweep = sections_of(analysis), {}
    text, virtual = methods(analysis), {item.virtual for item in job.runs}
    return {
        "question": question,
        "facts": facts,
        "verdict": verdict,
        "sections": [section.prefixed(prefix) for section in sections],
        "methods": text,
        "numbers": {**of_sweep, "methods": text},
        "virtual": "" if True not in virtual else "some" if False in virtual else "all",
        "name": job.section,
        "runs": len(analysis.runs),
        "prefix": prefix,
    }


def _write_figures(output: Path, sections: Sequence[Section], progress: Progress) -> dict[str, str]:
    """Write all figures in parallel; return their SVG elements by name."""
    figures = [figure for section in sections for listed in section.figures.values() for figure in listed]
    (folder := output / "figures").mkdir(parents=True, exist_ok=True)
    # Forked processes inherit the figures; pickling them would take longer than drawing.
    context, (_, cores) = get_context("fork"), local_cores_of_host()
    with warnings.catch_warnings(), ProcessPoolExecutor(min(len(cores), 8), context, _drawn.extend, (figures,)) as pool:
        # The other threads show progress or compute: safe to fork.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        drawn = [pool.submit(_write_figure, number, folder) for number in range(len(figures))]
        return {figures[number].name: drawn[number].result() for number in progress(range(len(figures)), "drawing")}


_drawn: list[ReportFigure] = []  # filled in the processes of `_write_figures`


def _write_figure(number: int, folder: Path) -> str:
    """Write a figure of `_drawn` as SVG, PDF and PNG; return its SVG element."""
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
    FigureCanvasAgg(figure.figure).print_png(folder / f"{figure.name}.png")  # savefig would draw twice
    return text


# --- the page ---------------------------------------------------------------------------------------------------------
def sections_of(analysis: Analysis) -> list[Section]:
    """Draw all sections of the report by the plug-ins of `figures`, in their order; those without ORDER last."""
    from hpcdist.tools.report.figures.base import ReportFigure, ReportTable, Section

    sections = []
    figure_plugins = catalogue("figures")
    plugins = [(name, figure_plugins.load(name)) for name in figure_plugins.available()]
    for name, plugin in sorted(plugins, key=lambda entry: (getattr(entry[1], "ORDER", len(plugins)), entry[0])):
        parts = list(plugin.draw(analysis))
        figures: dict[int | None, list[ReportFigure]] = {}
        for part in parts:
            if isinstance(part, ReportFigure):
                figures.setdefault(part.ranks, []).append(part)
        tables = [part for part in parts if isinstance(part, ReportTable)]
        notes = [part for part in parts if isinstance(part, str)]
        if parts:
            sections.append(Section(name, getattr(plugin, "TITLE", name), figures, tables, notes))
    return sections


def _facts(analysis: Analysis) -> dict[str, str]:
    """Return the facts for the page's head by name: metric, target, budget, reference, runs, dates."""
    job, runs = analysis.job, [result.run for result in analysis.runs]
    better = "higher" if job.higher_is_better else "lower"
    target = wording.NONE if job.target is None else wording.value(job.metric, job.target)
    listed = {"metric": f"{job.metric} ({better} is better)", "target": target}
    if job.budget:
        listed["budget"] = ", ".join(f"{wording.number(v)} {unit}" for unit, v in job.budget.items())
    listed["reference"] = f"`{job.reference}`"
    listed["runs"] = f"{sum(run.ended for run in runs)} of {len(runs)} ended"
    if days := sorted({run.start.started[:10] for run in runs if run.start}):
        listed["started"] = " to ".join(dict.fromkeys((days[0], days[-1])))
    return listed


# --- the numbers ------------------------------------------------------------------------------------------------------
def numbers(analysis: Analysis, verdict: Verdict) -> dict[str, Any]:
    """Return all numbers of a job for JSON: conclusion, groups (`cells`), comparisons, scaling, runs, curves."""
    return {
        **criteria_of(analysis.job),
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
                "times_sooner": contrast.speedup,
                "times_sooner_p_corrected": contrast.p_speedup,
                "metric_difference": contrast.difference,
                "metric_difference_p_corrected": contrast.p_difference,
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
            str(result.run.folder): {
                "losses": _points(result.curves.losses),
                "evaluations": _points(result.curves.evaluations.drop(columns=["step", "epoch", "joules"])),
            }
            for result in analysis.job.runs
        },
    }


def _points(frame: DataFrame) -> list[dict[str, Any]]:
    return frame.rename(columns=lambda name: name.removeprefix("metric.")).to_dict("records")
