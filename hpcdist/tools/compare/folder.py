"""Write an experiment down in its folder, `comparison.json`, and refuse another one there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from hpcdist.config import differences
from hpcdist.errors import ConfigError, DataError
from hpcdist.records import replace_durably
from hpcdist.records.files import checked
from hpcdist.tools.compare.experiment import Experiment, Sweep
from hpcdist.tools.compare.plan import ComparedGroup, PlannedRun
from hpcdist.tools.runs import COMPARISON, read_comparison

VERSION = 1
E = TypeVar("E", bound=Experiment)


def read(output: Path) -> dict[str, Any] | None:
    """Read `comparison.json`; None where there is none.

    Raises:
        DataError: it is damaged, or of another version.
    """
    found = read_comparison(output)
    if found is not None and (found.get("version") != VERSION or not isinstance(found.get("declared"), dict)):
        raise DataError(
            f"{output / COMPARISON} must hold a declaration of version {VERSION}; got version {found.get('version')}. "
            "Give another folder."
        )
    if found is not None:
        found["declared"].setdefault("arguments", None)  # of older versions, which had jobs alone
    return found


def read_experiment(output: Path, kind: type[E]) -> E:
    """Read the comparison, or the sweep, that a folder holds.

    Raises:
        ConfigError: the folder holds none of that kind.
    """
    names, given = [f.name for f in fields(kind)], (read(output) or {}).get("declared", {})
    if not set(names) <= given.keys():
        noun, other = ("sweep", "compare") if kind is Sweep else ("comparison", "sweep")
        there = f"another thing: `hpcdist {other} --output {output}` goes on with it" if given else "none"
        raise ConfigError(
            f"JOB must be given where there is no {noun} to go on with; got none, and {output / COMPARISON} holds "
            f"{there}."
        )
    own = {name: given[name] for name in names}
    return checked(own, kind, output / COMPARISON, "hold a declaration", "Give JOB, or another folder.")


def default(wanted: Path, experiment: Experiment) -> Path:
    """Choose a folder where the user has named none: the one that holds this comparison or sweep, else a free one.

    These are `wanted`, `wanted-2`, `wanted-3`... What a simulation measures once for each folder is not compared.
    """
    given, number, folder = as_json(experiment), 1, wanted
    while (found := read(folder)) is not None:
        there = dict(found["declared"])
        if given["virtual"] and there.get("virtual"):
            there["virtual"] = {key: there["virtual"].get(key) for key in given["virtual"]}
        if not differences(there, given):
            break
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def require_same(output: Path, experiment: Experiment) -> None:
    """Check that the folder holds this comparison or sweep, or none.

    Raises:
        ConfigError: it holds another one; names the settings that differ.
    """
    found = read(output)
    if found is not None and (different := differences(found["declared"], as_json(experiment))):
        raise ConfigError(
            f"--output must be a new folder, or one of this comparison; got {output}, which holds another: "
            f"{'; '.join(different)} now. Give another folder, or the settings of that one."
        )


def write(
    output: Path,
    experiment: Experiment,
    *,
    higher_is_better: bool,
    groups: Sequence[ComparedGroup],
    runs: Sequence[PlannedRun],
    skipped: Sequence[str] = (),
    tuning: Mapping[str, Any] | None = None,
) -> None:
    """Write `comparison.json`.

    Args:
        groups: in the order in which they were declared, the first of which is the reference unless `allreduce` is.
        skipped: sentences that say what can't be run, and why.
        tuning: rates that were chosen, and by what.
    """
    names = [group.name for group in groups if group.kind == "strategy"]
    found = {
        "version": VERSION,
        **{key: getattr(experiment, key) for key in ("job", "metric", "target", "budget", "virtual")},
        "higher_is_better": higher_is_better,
        "reference": "allreduce" if "allreduce" in names else next(iter(names), None),
        "tuning": tuning,
        "left_out": list(skipped),
        "declared": asdict(experiment),
        "runs": [
            {key: getattr(run, key) for key in ("folder", "name", "kind", "ranks", "seed")} | {"set": run.overrides}
            for run in runs
        ],
    }
    output.mkdir(parents=True, exist_ok=True)
    replace_durably(output / COMPARISON, (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode())


def as_json(experiment: Experiment) -> dict[str, Any]:
    """Return an experiment in JSON's types."""
    return json.loads(json.dumps(asdict(experiment)))
