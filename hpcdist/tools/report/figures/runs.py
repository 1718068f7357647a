"""Settings that differ, hosts, versions, and the runs without a result."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpcdist.records import Start
from hpcdist.tools.report.analysis import Analysis, RunGroup
from hpcdist.tools.report.figures.base import Part, ReportTable
from hpcdist.tools.report.wording import NONE

TITLE, ORDER = "Runs and settings", 8


def draw(analysis: Analysis) -> Iterator[Part]:
    """Yield tables of failed runs, of settings that differ, and of hosts and versions."""
    if analysis.failures:
        heads = ["run", "ranks", "seed", "folder", "outcome"]
        rows = [[r.name, *map(str, (r.ranks, r.seed, r.run.folder)), r.run.failure or ""]
                for r in analysis.failures]  # fmt: skip
        yield ReportTable("Runs without a result", heads, rows)
    if analysis.job.settings:
        rows = [
            [
                group.title,
                *(_listed(setting.get(r.run.folder) for r in group.runs) for setting in analysis.job.settings.values()),
            ]
            for group in analysis.groups
        ]
        yield ReportTable("Settings that differ", ["group", *analysis.job.settings], rows)
    heads = ["group", "runs that ended", "seeds", "hosts", "commit", "versions", "started"]
    yield ReportTable("How the runs were executed", heads, [_provenance(group) for group in analysis.groups])
    if not any(r.run.start for r in analysis.job.runs):
        yield "Settings, hosts, versions: not recorded."


def _listed(values: Iterator[str | None]) -> str:
    return ", ".join(dict.fromkeys(value for value in values if value is not None)) or NONE


def _provenance(group: RunGroup) -> list[str]:
    """Return the hosts, commits, versions and dates of a group's runs; shared values once."""
    starts = [result.run.start for result in group.runs if result.run.start]
    dates = sorted(start.started for start in starts)

    def every(write: Callable[[Start], str]) -> str:
        return "; ".join(sorted({write(start) for start in starts})) or NONE

    return [
        group.title,
        f"{len(group.ended)} of {len(group.runs)}",
        ", ".join(str(result.seed) for result in group.runs),
        every(lambda start: ", ".join(dict.fromkeys(start.hosts))),
        every(lambda start: (start.commit or "none")[:10] + (" with changes" if start.dirty else "")),
        every(lambda start: ", ".join(f"{name} {version}" for name, version in start.versions.items() if version)),
        " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else NONE,
    ]
