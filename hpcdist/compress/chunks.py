"""A tensor in pieces, so that what is made of each one on the way stays in the cache."""

from __future__ import annotations

from collections.abc import Iterator

CHUNK = 1 << 18  # elements; fewer take longer, as each piece costs some calls


def chunks(count: int, size: int = CHUNK) -> Iterator[slice]:
    """The ranges of `size` elements, the last one of the rest, that make up 0..count."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
