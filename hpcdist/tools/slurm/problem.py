"""A problem of a job: a message and its level."""

from __future__ import annotations

from typing import NamedTuple


class Problem(NamedTuple):
    """Something about a job that is wrong (error), may be wrong (warning), or could not be examined (note)."""

    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.text}"
