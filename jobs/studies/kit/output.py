"""A study's folder: its tables, claims and figures, one file with everything, and the list of all files."""

from __future__ import annotations

import csv
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdist.errors import HpcdistError
from hpcdist.tools import console
from kit.groups import EndedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
COLUMNS = 120


class Study:
    """Show what the runs of a study say, and write all of it to the folder that they are in."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: list[str] = []
        self._found: dict[str, Any] = {}
        self.tables: dict[str, list[Row]] = {}  # by their names
        folder.mkdir(parents=True, exist_ok=True)

    def file(self, name: str) -> Path:
        """Give the path of a file in the folder, and list it among those that were written."""
        if name not in self._files:
            self._files.append(name)
        return self.folder / name

    def table(self, name: str, rows: Iterable[Row], remark: str = "") -> list[Row]:
        """Show a table, one column per key of the first row, and keep it by its name; its rows.

        Args:
            remark: shown after the name.
        """
        self.tables[name] = list(rows)
        console.rows(name + remark, self.tables[name])
        return self.tables[name]

    def write_csv(self, name: str, rows: Sequence[Row]) -> None:
        """Write a table."""
        with open(self.file(name), "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    def claims(self, paragraphs: Sequence[str], name: str = "claims.txt") -> None:
        """Show what the runs say, write it, and keep it."""
        self._found["claims"] = list(paragraphs)
        text = "\n\n".join(paragraphs)
        print(text)
        self.file(name).write_text(text + "\n", encoding="utf-8")

    def draw(self, figures: Mapping[str, Figure]) -> None:
        """Write figures."""
        from kit import plots  # needs matplotlib, which a study without figures does not

        self._files += plots.save(figures, self.folder)

    def end(self, runs: Iterable[EndedRun], **found: Any) -> None:
        """Write `results.json`, with tables, claims, what was `found` beside them and all runs; list the files."""
        content = {"tables": self.tables, **self._found, **found, "runs": [run.as_table() for run in runs]}
        text = json.dumps(content, indent=1, ensure_ascii=False)
        self.file("results.json").write_text(text, encoding="utf-8")
        print(f"\nwritten to {self.folder}: {', '.join(self._files)}", file=sys.stderr)


# --- claims: each with a verdict by the rule that it states -----------------------------------------------------------
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


# --- helpers ----------------------------------------------------------------------------------------------------------
def markdown(rows: Sequence[Row]) -> str:
    """Write a table as Markdown."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(map(str, row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def start(main: Callable[..., None]) -> None:
    """Run a study's command line; of an error show its message."""
    import typer

    try:
        typer.run(main)
    except HpcdistError as error:
        console.error(str(error))
        sys.exit(1)
