"""A tensor in pieces, small enough that intermediate results stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator

CHUNK = 1 << 18  # elements; fewer take longer, as each piece costs some calls


def chunks(count: int, size: int = CHUNK) -> Iterator[slice]:
    """Cut the range 0..count into slices of `size` elements; the last one has the rest."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
