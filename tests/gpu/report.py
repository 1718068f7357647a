"""The Markdown of a run of `tests/gpu.sh`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TITLES = {
    "wheels": "Wheels",
    "environment": "Environment",
    "ranks": "Two ranks",
    "tests": "Tests, in one process",
    "tests_on_ranks": "Tests, on two ranks",
    "loops": "Loops as users write them, compared with one process",
    "loops_on_one_rank": "The same on one rank, which has the GPU for itself",
    "steps": "A training step",
    "steps_on_one_rank": "A training step of one rank, which has the GPU for itself",
    "messages": "Messages of device memory: by pinned host memory, and given to MPI itself",
    "coding": "Compressors: coding with error feedback, and decoding",
    "horovod_build": "Building Horovod with NCCL",
    "horovod": "A training step by Horovod",
}
SHOWN_LINES = 25  # of the output of what failed


def markdown(found: Mapping) -> str:
    """Write the whole report."""
    parts = found["parts"]
    lines = [f"# {found['machine']}", "", f"{found['started']}, {found.get('seconds', 0):.0f} s, on {found['device']}."]
    lines += ["", *_environment(found), "", "| part | | seconds | |", "|---|---|---:|---|"]
    for part in parts:
        lines.append(f"| {part['name']} | {part['state']} | {part['seconds']:.1f} | {_cell(part['reason'])} |")
    for part in parts:
        told = _part(part)
        lines += ["", f"## {TITLES.get(part['name'], part['name'])}", *told] if told else []
    return "\n".join(lines) + "\n"


def _environment(found: Mapping) -> list[str]:
    environment = found.get("environment", {})
    lines = []
    if found.get("missing"):
        lines.append(f"- **missing packages**: {', '.join(found['missing'])} (give them as wheels: WHEELS=folder)")
    if found.get("wheels"):
        lines.append(f"- taken from the wheels: {', '.join(found['wheels'])}")
    for key, value in environment.items():
        if key == "gpus":
            value = ", ".join(f"{gpu['name']} ({gpu['gib']} GiB)" for gpu in value) or "none"
        if key == "problems":
            value = "; ".join(f"{name}: {text}" for name, text in value.items()) or "none"
        lines.append(f"- {key}: {value}")
    return [*lines, f"- launcher: {found.get('launcher')}"]


def _part(part: Mapping) -> list[str]:
    notes = [f"- {note}" for note in part.get("notes", [])]
    lines = ["", *notes] if notes else []
    if part["rows"]:
        lines += ["", *table(part["rows"])]
    last = part["output"].strip().splitlines()
    if part["state"] in ("failed", "late"):
        lines += ["", f"{part['state']}: {part['reason']}", "", "```", *last[-SHOWN_LINES:], "```"]
    elif part["name"].startswith(("tests", "loops")) and last:
        lines += ["", "```", *last[-SHOWN_LINES:], "```"]
    elif part["reason"]:
        lines += ["", f"{part['state']}: {part['reason']}"]
    return lines


def table(rows: Sequence[Mapping]) -> list[str]:
    """Format rows with their units."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(_heading(key) for key in keys) + " |", "|" + "---|" * len(keys)]
    return lines + ["| " + " | ".join(_value(key, row.get(key)) for key in keys) + " |" for row in rows]


def _heading(key: str) -> str:
    if key.endswith("bytes_per_s"):
        return key.removesuffix("bytes_per_s").strip("_") + " GB/s"
    return key.removesuffix("_s") + " ms" if key.endswith("_s") else key.replace("_", " ")


def _value(key: str, value: object) -> str:
    if value is None:
        return ""
    if key.endswith("bytes_per_s"):
        return f"{value / 1e9:.3g}"
    if key.endswith("_s"):
        return f"{value * 1e3:.4g}"
    return f"{value:.4g}" if isinstance(value, float) else _cell(str(value))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
