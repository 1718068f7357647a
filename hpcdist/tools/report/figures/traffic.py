"""Bytes and messages that all ranks have sent and fetched."""

from __future__ import annotations

from collections.abc import Iterator

from hpcdist.tools.report import wording
from hpcdist.tools.report.analysis import Analysis
from hpcdist.tools.report.figures.base import Part, ReportTable, dots

TITLE, ORDER = "Bytes and messages", 6


def draw(analysis: Analysis) -> Iterator[Part]:
    """Yield bytes and messages per step, as figures and a table."""
    groups = [group for group in analysis.groups if group.ended and group.ranks > 1]
    if not groups:
        yield "One rank sends nothing."
        return
    for unit, write in (("bytes", wording.amount), ("messages", wording.number)):
        values = [(group, group[f"{unit}_per_step"].values(), group.mean(f"{unit}_per_step"), "") for group in groups]
        title = f"{unit.capitalize()} per step of a worker"
        yield from dots(analysis, f"{unit}-per-step", title, unit, values, write, low=0)
    if any(group.name.startswith("allreduce") for group in groups):
        yield (
            "A ring all-reduce of n bytes of gradients sends 2n(p − 1)/p bytes for each of p ranks. In addition, "
            "`allreduce` sends buffers, such as batch norm's averages, and 32 bytes that check gradients and settings."
        )
    rows = []
    for group in groups:
        sent, to_target = map(wording.amount, (group.mean("bytes_per_step"), group.mean("bytes_to_target")))
        rows.append([group.title, sent, wording.plain(group.mean("messages_per_step")), to_target])
    heads = ["group", "bytes per step", "messages per step", "bytes to the target"]
    yield ReportTable("Sent and fetched by all ranks, per step of a worker", heads, rows)
