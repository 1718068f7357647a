"""Claims held against what was measured: a paragraph for each, with a verdict by the rule that it states."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

COLUMNS = 120


@dataclass(frozen=True)
class Claim:
    """A sentence, whether each part of it holds, and the numbers and the rule that say so."""

    sentence: str
    parts: Sequence[bool]
    numbers: str

    def __str__(self) -> str:
        return f"{self.sentence} {verdict(self.parts)}. {self.numbers}"


def verdict(parts: Sequence[bool]) -> str:
    """Tell whether all parts of a claim hold, some, or none."""
    if not parts:
        return "NOT RUN"
    return "SHOWN" if all(parts) else "SHOWN IN PART" if any(parts) else "NOT SHOWN"


def paragraphs(claims: Iterable[Claim]) -> list[str]:
    """Write claims out, numbered, as lines that are not too long."""
    return [wrap(f"{number}. {claim}") for number, claim in enumerate(claims, 1)]


def wrap(text: str) -> str:
    """Wrap a paragraph into lines."""
    return textwrap.fill(text, COLUMNS, break_on_hyphens=False)
