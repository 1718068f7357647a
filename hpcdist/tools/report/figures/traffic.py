"""Bytes and messages that all ranks have sent and fetched."""

from __future__ import annotations

from collections.abc import Iterator

from hpcdist.tools.report import wording
from hpcdist.tools.report.analysis import Analysis
from hpcdist.tools.report.figures.base import Part, ReportTable, dots

TITLE, ORDER = "Bytes and messages", 6


def draw(analysis: Analysis) -> Iterator[Part]:
    cells = [cell for cell in analysis.cells if cell.ended and cell.ranks > 1]
    if not cells:
        yield "One rank sends nothing."
        return
    for what, write in (("bytes", wording.amount), ("messages", wording.number)):
        found = [(cell, cell[f"{what}_per_step"].values(), cell.mean(f"{what}_per_step"), "") for cell in cells]
        title = f"{what.capitalize()} per step of a worker"
        yield from dots(analysis, f"{what}-per-step", title, what, found, write, least=0)
    if any(cell.name.startswith("allreduce") for cell in cells):
        yield (
            "A ring all-reduce of n bytes of gradients sends 2n(p − 1)/p bytes for each of p ranks. Beyond these, "
            "`allreduce` sends buffers, such as batch norm's averages, and 32 bytes that check gradients and settings."
        )
    rows = []
    for cell in cells:
        sent, to_target = map(wording.amount, (cell.mean("bytes_per_step"), cell.spent_to_target("bytes")))
        rows.append([cell.title, sent, wording.plain(cell.mean("messages_per_step")), to_target])
    heads = ["runs of one kind", "bytes per step", "messages per step", "bytes to the target"]
    yield ReportTable("Sent and fetched by all ranks, per step of a worker", heads, rows)
