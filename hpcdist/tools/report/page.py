"""Write a report: a page that needs nothing beside it, every figure as SVG and PNG, every number as CSV and JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from hpcdist import __version__
from hpcdist.errors import ConfigError
from hpcdist.records import now, writing
from hpcdist.tools.report import numbers, tables
from hpcdist.tools.report.analysis import Findings, analyse
from hpcdist.tools.report.read import read
from hpcdist.tools.report.verdict import judge

if TYPE_CHECKING:
    from hpcdist.tools.report.figures import ReportFigure

TEMPLATE = "template.html.j2"
SHOWN_REASONS = 8  # the others are folded
SECTIONS = {  # of figures and tables; those of curves are made as they come
    "answer": "The answer in numbers",
    "curves": "How they got there",
    "staleness": "Staleness",
    "time": "Where time went",
    "scaling": "Scaling",
    "traffic": "Bytes and messages",
    "energy": "Energy",
    "runs": "Runs and settings",
}


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        folded: further figures, by the title of what the reader unfolds.
    """

    name: str
    title: str
    figures: Sequence[Picture]
    folded: Sequence[tuple[str, Sequence[Picture]]]
    tables: Sequence[tables.ReportTable]
    remarks: Sequence[str]


@dataclass(frozen=True)
class Picture:
    """A figure, as an element of the page."""

    name: str
    title: str
    description: str
    svg: Markup


def write(
    folder: Path | Sequence[Path], output: Path | None = None, *, target: tuple[str, float] | None = None
) -> Path:
    """Write the report on a comparison's folder, or on any folders of runs; return the page.

    Args:
        output: folder for `index.html`, `figures`, `runs.csv` and `runs.json`; None is `report` in the first folder.
        target: a metric and the value to be reached, where no comparison names them.

    Raises:
        ConfigError: there is no run, or matplotlib is not installed.
        DataError: a file is damaged.
        OutputError: a file can't be written.
    """
    try:
        from hpcdist.tools.report import figures, svg
    except ImportError as error:
        raise ConfigError(
            "matplotlib must be installed to draw a report's figures; got none. Run: pip install 'hpcdist[plots]'"
        ) from error
    folders = [folder] if isinstance(folder, Path) else list(folder)
    output = folders[0] / "report" if output is None else output
    findings = analyse(read(folders, target))
    verdict, drawn = judge(findings), figures.draw(findings)
    pictures = {figure.name: svg.inline(figure) for figure in drawn}
    page = output / "index.html"
    with writing(page):
        (output / "figures").mkdir(parents=True, exist_ok=True)
        for figure in drawn:
            (output / "figures" / f"{figure.name}.svg").write_text(svg.standalone(pictures[figure.name]), "utf-8")
            figure.figure.savefig(output / "figures" / f"{figure.name}.png", dpi=150, facecolor="white")
        numbers.write_csv(findings, output / "runs.csv")
        numbers.write_json(findings, verdict, output / "runs.json")
        page.write_text(_render(findings, verdict, _sections(findings, drawn, pictures)), "utf-8")
    return page


def _render(findings: Findings, verdict: Any, sections: Sequence[Section]) -> str:
    evidence = findings.evidence
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["code"] = _code
    virtual = [bool(run.virtual) for run in evidence.runs]
    return environment.get_template(TEMPLATE).render(
        title=Path(evidence.title).name if evidence.title.endswith(".py") else evidence.title,
        facts=tables.facts(findings),
        verdict=verdict,
        shown_reasons=SHOWN_REASONS,
        sections=sections,
        virtual="all" if all(virtual) else "some" if any(virtual) else "",
        written=now(),
        version=__version__,
    )


def _code(text: str) -> Markup:
    """Mark names in backquotes as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _sections(findings: Findings, drawn: Sequence[ReportFigure], pictures: dict[str, str]) -> list[Section]:
    made = []
    for name, title in SECTIONS.items():
        groups: dict[str, list[Picture]] = {}
        for figure in drawn:
            section, _, part = figure.section.partition("-")
            if section == name:
                picture = Picture(figure.name, figure.title, figure.description, Markup(pictures[figure.name]))
                groups.setdefault(part, []).append(picture)
        first, *rest = groups.items() or [("", [])]
        folded = [(f"The same on {part} rank{'s' * (part != '1')}", shown) for part, shown in rest]
        found = Section(name, title, first[1], folded, *tables.of_section(name, findings))
        if found.figures or found.tables or found.remarks:
            made.append(found)
    return made
