"""Write a comparison down in its folder, `comparison.json`, and refuse another one there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hpcdist.config import differences
from hpcdist.errors import ConfigError, DataError
from hpcdist.records import replace_durably
from hpcdist.tools.compare.plan import ComparedCell, PlannedRun

FILE_NAME = "comparison.json"
VERSION = 1


class Declared(Protocol):
    """The declaration of a comparison or a sweep, a dataclass, as far as it is the same."""

    job: str
    metric: str
    target: float | None
    budget: Mapping[str, float]
    virtual: Mapping[str, object] | None


D = TypeVar("D", bound=Declared)


def read(output: Path) -> dict[str, Any] | None:
    """Read `comparison.json`; None where there is none.

    Raises:
        DataError: it is damaged.
    """
    path = output / FILE_NAME
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_bytes())
        if found["version"] != VERSION:
            raise ValueError(f"version {found['version']}, not {VERSION}")
        return found
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path} must hold a comparison's declaration; got {error!r}. Give another folder.") from None


def declared_in(output: Path, kind: type[D]) -> D:
    """Read the declaration of the comparison, or of the sweep, that a folder holds.

    Raises:
        ConfigError: the folder holds none of that kind.
    """
    found, names = read(output), {f.name for f in fields(kind)}
    given = {} if found is None else found["declared"]
    if not names <= given.keys():
        noun, other = ("sweep", "compare") if "over" in names else ("comparison", "sweep")
        there = f"another thing: `hpcdist {other} --output {output}` goes on with it" if given else "none"
        raise ConfigError(
            f"JOB must be given where there is no {noun} to go on with; got none, and {output / FILE_NAME} holds "
            f"{there}."
        )
    return kind(**{name: tuple(given[name]) if isinstance(given[name], list) else given[name] for name in names})


def require_same(output: Path, declared: Declared) -> None:
    """Check that the folder holds this comparison or sweep, or none.

    Raises:
        ConfigError: it holds another one; names the settings that differ.
    """
    found = read(output)
    if found is None:
        return
    different = differences(found["declared"], json.loads(json.dumps(asdict(declared))))
    if different:
        raise ConfigError(
            f"--output must be a new folder, or one of this comparison; got {output}, which holds another: "
            f"{'; '.join(different)} now. Give another folder, or the settings of that one."
        )


def write(
    output: Path,
    declared: Declared,
    *,
    higher_is_better: bool,
    cells: Sequence[ComparedCell],
    runs: Sequence[PlannedRun],
    left_out: Sequence[str] = (),
    tuning: Mapping[str, Any] | None = None,
) -> None:
    """Write `comparison.json`.

    Args:
        cells: in the order in which they were declared, the first of which is the reference unless `allreduce` is.
        left_out: sentences that say what can't be run, and why.
        tuning: rates that were chosen, and by what.
    """
    names = [cell.name for cell in cells if cell.kind == "strategy"]
    found = {
        "version": VERSION,
        "job": declared.job,
        "metric": declared.metric,
        "higher_is_better": higher_is_better,
        "target": declared.target,
        "budget": dict(declared.budget),
        "reference": "allreduce" if "allreduce" in names else next(iter(names), None),
        "virtual": declared.virtual,
        "tuning": tuning,
        "left_out": list(left_out),
        "declared": asdict(declared),
        "runs": [
            {
                "folder": run.folder,
                "name": run.name,
                "kind": run.kind,
                "ranks": run.ranks,
                "seed": run.seed,
                "set": list(run.overrides),
            }
            for run in runs
        ],
    }
    output.mkdir(parents=True, exist_ok=True)
    replace_durably(output / FILE_NAME, (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode())
