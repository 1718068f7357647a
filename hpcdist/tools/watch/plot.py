"""Draw curves and bars with characters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a braille character: by column, from above
LABEL = 7  # characters of the numbers on the left


def curve(points: Sequence[tuple[float, float]], columns: int, rows: int, *, braille: bool = True) -> list[str]:
    """Draw a curve in lines of `columns` characters: its range on the left, the first and the last x below."""
    points = [(x, y) for x, y in points if math.isfinite(y)]
    if not points:
        return [" " * columns] * (rows + 1)
    width, height = 2 * (columns - LABEL - 1), 4 * rows
    low, high = min(y for _, y in points), max(y for _, y in points)
    cells = [[0] * (width // 2) for _ in range(rows)]
    before = None
    for column, y in enumerate(_resampled(points, width)):
        if y is None:
            continue
        dot = height // 2 if high == low else round((high - y) / (high - low) * (height - 1))
        for one in range(min(dot, before or dot), max(dot, before or dot) + 1) if before is not None else (dot,):
            cells[one // 4][column // 2] |= DOTS[column % 2][one % 4]
        before = dot
    drawn = ["".join(chr(0x2800 + cell) if braille else " *"[cell > 0] for cell in line) for line in cells]
    labels = [f"{high:.3g}", *[""] * (rows - 2), f"{low:.3g}"] if high > low else [*[""] * (rows // 2), f"{low:.3g}"]
    labels += [""] * (rows - len(labels))
    first, last = f"{points[0][0]:.0f}", f"{points[-1][0]:.0f}"
    below = f"{'step':>{LABEL}} {first}{last:>{width // 2 - len(first)}}"
    return [f"{label:>{LABEL}} {line}" for label, line in zip(labels, drawn)] + [below]


def _resampled(points: Sequence[tuple[float, float]], width: int) -> list[float | None]:
    """Return the mean of the values that fall on each of `width` columns; between them, the line that joins them."""
    first, last = points[0][0], points[-1][0]
    means: dict[int, list[float]] = {}
    for x, y in points:
        means.setdefault(0 if last == first else round((x - first) / (last - first) * (width - 1)), []).append(y)
    known = [(column, sum(ys) / len(ys)) for column, ys in sorted(means.items())]
    found: list[float | None] = [None] * width
    found[known[0][0]] = known[0][1]
    for (left, a), (right, b) in itertools.pairwise(known):
        for column in range(left, right + 1):
            found[column] = a + (b - a) * (column - left) / (right - left)
    return found


def shares(parts: Sequence[float], columns: int) -> list[int]:
    """Divide `columns` characters by parts of 1, so that they sum to `columns` if the parts sum to 1."""
    ends = [round(min(1.0, sum(parts[: n + 1])) * columns) for n in range(len(parts))]
    return [end - start for start, end in zip([0, *ends], ends)]
