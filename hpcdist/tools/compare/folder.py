"""Write an experiment to `comparison.json` in its folder, and refuse a different one there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from hpcdist.config.merge import differences
from hpcdist.errors import ConfigError, DataError
from hpcdist.records import replace_durably
from hpcdist.records.files import checked
from hpcdist.tools.compare.experiment import Experiment, Sweep
from hpcdist.tools.compare.plan import ComparedGroup, PlannedRun
from hpcdist.tools.runs import COMPARISON, read_comparison

VERSION = 1
E = TypeVar("E", bound=Experiment)


def read(output: Path) -> dict[str, Any] | None:
    """Read `comparison.json`; None if it is missing. Raises DataError if it is damaged, or of another version."""
    content = read_comparison(output)
    if content is not None and (content.get("version") != VERSION or not isinstance(content.get("declared"), dict)):
        raise DataError(
            f"{output / COMPARISON} must hold an experiment of version {VERSION}; got version "
            f"{content.get('version')}. Give another folder."
        )
    if content is not None:
        content["declared"].setdefault("arguments", None)  # older versions had jobs only
    return content


def read_experiment(output: Path, kind: type[E]) -> E:
    """Read the comparison or sweep that a folder holds; raise ConfigError if it holds none of that kind."""
    names, declared = [f.name for f in fields(kind)], (read(output) or {}).get("declared", {})
    if not set(names) <= declared.keys():
        noun, other = ("sweep", "compare") if kind is Sweep else ("comparison", "sweep")
        held = f"another: `hpcdist {other} --output {output}` resumes it" if declared else "none"
        raise ConfigError(
            f"JOB must be given where there is no {noun} to resume; got none, and {output / COMPARISON} holds {held}."
        )
    values = {name: declared[name] for name in names}
    return checked(values, kind, output / COMPARISON, "hold an experiment", "Give JOB, or another folder.")


def default(base: Path, experiment: Experiment) -> Path:
    """Choose a folder if none is given: the one with this experiment, or the first free of `base`, `base-2`..."""
    declared, number, folder = as_json(experiment), 1, base
    while (content := read(folder)) is not None:
        held = dict(content["declared"])
        if declared["virtual"] and held.get("virtual"):  # without the step times that a simulation has measured
            held["virtual"] = {key: held["virtual"].get(key) for key in declared["virtual"]}
        if not differences(held, declared):
            break
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


def require_same(output: Path, experiment: Experiment) -> None:
    """Raise ConfigError, with the differences, if the folder holds another experiment."""
    content = read(output)
    if content is not None and (different := differences(content["declared"], as_json(experiment))):
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
        skipped: reasons why groups can't run, a sentence each.
        tuning: chosen learning rates, and how they were chosen.
    """
    strategies = [group.name for group in groups if group.kind == "strategy"]
    content = {
        "version": VERSION,
        **{key: getattr(experiment, key) for key in ("job", "metric", "target", "budget", "virtual")},
        "higher_is_better": higher_is_better,
        "reference": "allreduce" if "allreduce" in strategies else next(iter(strategies), None),
        "tuning": tuning,
        "left_out": list(skipped),
        "declared": asdict(experiment),
        "runs": [
            {key: getattr(run, key) for key in ("folder", "name", "kind", "ranks", "seed")} | {"set": run.overrides}
            for run in runs
        ],
    }
    output.mkdir(parents=True, exist_ok=True)
    replace_durably(output / COMPARISON, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def as_json(experiment: Experiment) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(experiment)))
