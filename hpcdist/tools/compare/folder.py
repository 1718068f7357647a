"""Write an experiment to `comparison.json` in its folder, and refuse a different one there."""

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
    """Read `comparison.json`; None if it is missing.

    Raises:
        DataError: it is damaged, or of another version.
    """
    found = read_comparison(output)
    if found is not None and (found.get("version") != VERSION or not isinstance(found.get("declared"), dict)):
        raise DataError(
            f"{output / COMPARISON} must hold an experiment of version {VERSION}; got version {found.get('version')}. "
            "Give another folder."
        )
    if found is not None:
        found["declared"].setdefault("arguments", None)  # older versions had jobs only
    return found


def read_experiment(output: Path, kind: type[E]) -> E:
    """Read the comparison or sweep that a folder holds.

    Raises:
        ConfigError: the folder holds none of that kind.
    """
    names, given = [f.name for f in fields(kind)], (read(output) or {}).get("declared", {})
    if not set(names) <= given.keys():
        noun, other = ("sweep", "compare") if kind is Sweep else ("comparison", "sweep")
        there = f"another: `hpcdist {other} --output {output}` resumes it" if given else "none"
        raise ConfigError(
            f"JOB must be given where there is no {noun} to resume; got none, and {output / COMPARISON} holds {there}."
        )
    own = {name: given[name] for name in names}
    return checked(own, kind, output / COMPARISON, "hold an experiment", "Give JOB, or another folder.")


def default(wanted: Path, experiment: Experiment) -> Path:
    """Choose a folder if the user named none: the one with this experiment, or the first free one of `base`,
    `base-2`...

    Only the settings of a virtual cluster are compared, not the step times that a simulation has measured for the
    folder.
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
    """Raise ConfigError, with the differences, if the folder holds another experiment."""
    found = read(output)
    if found is not None and (different := differences(found["declared"], as_json(experiment))):
        raise ConfigError(
            f"--output must be a new folder, or one with the same settings; got {output}, where others are: "
            f"{'; '.join(different)} now. Give another folder, or those settings."
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
        groups: in the user's order; the reference is `allreduce`, or the first one.
        skipped: one sentence for each group that can't run.
        tuning: chosen learning rates, and how they were chosen.
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
    """Return an experiment as plain JSON types."""
    return json.loads(json.dumps(asdict(experiment)))
