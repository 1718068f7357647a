"""Draw a schedule as text: a line for each rank, time from left to right."""

from __future__ import annotations

from hpcdist.parallel.schedules import Operation, Table, Timing

LETTERS = "abcdefghijklmnopqrstuvwxyz"  # of a rank's first stage, its second...


def gantt(table: Table, timing: Timing, columns: int = 120) -> list[str]:
    """Draw the operations of each rank, as wide as their time, and their micro-batches.

    `F2b--` is the forward pass of micro-batch 2 in the rank's second stage; ranks with one stage have no letters.
    Where an operation is too narrow, the letter is left out, or the number too. There are fewer columns where these
    are enough for all.
    """
    ranks, chunks = len(table), 1 + max((op.stage for ops in table for op in ops), default=0) // len(table)
    lines = [
        [(_label(op, ranks, chunks), *span) for op, span in zip(ops, spans)]
        for ops, spans in zip(table, timing.spans_s)
    ]
    enough = [(len(label) + 1) / (end - start) for line in lines for label, start, end in line if end > start]
    scale = min(columns / (timing.makespan_s or 1.0), max(enough, default=1.0))
    return [f"rank {rank:<{len(str(ranks - 1))}}  {_drawn(line, scale)}" for rank, line in enumerate(lines)]


def _label(operation: Operation, ranks: int, chunks: int) -> str:
    letter = LETTERS[operation.stage // ranks % len(LETTERS)] if chunks > 1 else ""
    return f"{operation.kind}{operation.micro_batch}{letter}"


def _drawn(line: list[tuple[str, float, float]], scale: float) -> str:
    drawn = ""
    for label, start, end in line:
        width = round(end * scale) - round(start * scale)
        text = next(text for text in (label, label.rstrip(LETTERS), label[0], "") if len(text) <= width)
        drawn = drawn.ljust(round(start * scale)) + text.ljust(width, "-")
    return drawn
