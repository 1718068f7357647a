"""Make tables of the documentation from runs that jobs/evidence.sh has made.

    python docs/tables.py compression runs/evidence/compression docs/data/compression.csv    # then docs/plots.py

Means over the seeds of all runs that have ended, with 95 % intervals (Student's t); differences and ratios are taken
seed by seed. An asterisk stands where one is real: p < 0.05 after Holm's correction for all of a table's comparisons.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

import bench_tables
import numpy as np
import typer
from bench_tables import Table, short

from hpcdist.config.files import load_module
from hpcdist.tools.report.analysis import SIGNIFICANT, Analysis, Contrast, RunGroup, analyse
from hpcdist.tools.report.results import JobRuns, read_jobs
from hpcdist.tools.statistics import interval

STUDY = load_module(Path(__file__).parents[1] / "jobs" / "studies" / "devices.py")
NETWORKS = {"100 Mbit/s": "100Mbit", "1 Gbit/s": "1Gbit"}
KINDS = {"": "", "-graphs": "", "-momentum": ", momentum 0.9", "-bits": ", ε = 10⁻⁴", "-signs": ""}  # and what is told
OPTIONS = {  # the parts that vary one
    "delay": "delay", "late": "period", "dense sparse": "period", "parts": "share", "order": "order",
    "signs": "transform",
}  # fmt: skip
CONDITIONS = {"jitter": "even steps", "straggler": "a straggler", "exponential": "exponential steps"}


# --- the tables, by their names ---------------------------------------------------------------------------------------
def compression(folder: Path) -> Table:
    """Set accuracy beside the bytes that each compressor saves, on each number of ranks."""
    findings = analyse(_read(folder))
    groups = _groups(findings)
    numbers = sorted({ranks for _, ranks in groups})
    names = list(dict.fromkeys(name for name, _ in groups))  # in order, which those of equal bytes keep

    def times(name: str, ranks: int) -> float:
        return _bytes(groups[findings.job.reference, ranks]) / _bytes(groups[name, ranks])

    head = ["compression"]
    for ranks in numbers:
        head += [f"bytes fewer, {ranks} ranks", f"accuracy in %, {ranks} ranks", "minus uncompressed"]
    rows = []
    for name in sorted(names, key=lambda name: times(name, numbers[0])):
        row = [shown(name).removeprefix("`allreduce`, ")]
        for ranks in numbers:
            row += [short(times(name, ranks)), _accuracy(groups[name, ranks]), _gap(findings, groups[name, ranks])]
        rows.append(row)
    return [head, *rows]


def modulation(folder: Path) -> Table:
    """Set accuracy beside staleness."""
    findings = analyse(replace(_read(folder), reference="hardsync"))
    rows = []
    for group in _in_order(findings):
        stale = sum(value * share for value, share in group.staleness.items())
        staleness = [f"{stale:.3g}", str(max(group.staleness, default=0))]
        rows.append([shown(group.name), *staleness, _accuracy(group), _gap(findings, group)])
    return [["strategy", "mean staleness", "largest", "accuracy in %", "minus `hardsync`"], *rows]


def gossip(folder: Path) -> Table:
    """Set times to the target beside each other, under each model of the time of a step."""
    of_each = {name: analyse(_read(folder / name)) for name in CONDITIONS}
    head, rows = ["strategy"], {group.name: [shown(group.name)] for group in _in_order(of_each["jitter"])}
    for name, findings in of_each.items():
        head += [f"{CONDITIONS[name]}: s to {_target(findings)}", "times sooner", "accuracy in %"]
        for group in _in_order(findings):
            rows[group.name] += [_seconds(group), _sooner(findings, group), _accuracy(group)]
    return [head, *rows.values()]


def slow_link(folder: Path) -> Table:
    """Set times and bytes to the target beside each other."""
    findings = analyse(_read(folder))
    rows = []
    for group in _in_order(findings):
        rows.append([shown(group.name), _seconds(group), _sooner(findings, group), _megabytes(group), _accuracy(group)])
    target = _target(findings)
    return [["strategy", f"s to {target}", "times sooner", f"MB to {target}", "accuracy in %"], *rows]


def sandblaster(folder: Path) -> Table:
    """Set times and bytes to the target beside each other, of comparisons with batches of their own.

    Seconds are virtual on virtual ranks; on real ones they are those of a clock, on the cores that the ranks shared.
    """
    of_each = [analyse(_read(path.parent)) for path in sorted(folder.glob("*/comparison.json"))]
    target = _target(of_each[0])
    rows = [["ranks", "strategy", "batch of all workers", f"s to {target}", f"MB to {target}"]]
    groups = (group for findings in of_each for group in _in_order(findings))
    for group in sorted(groups, key=lambda group: (group.ranks, not group.virtual)):
        ranks = f"{group.ranks} {'virtual' if group.virtual else 'real'}"
        rows.append([ranks, shown(group.name), str(group.total_batch), _seconds(group), _megabytes_of_each(group)])
    return rows


def devices(folder: Path) -> Table:
    """Set the seconds of an epoch on one and on two ranks beside the reported ones; of each seed, as they are few."""
    groups = _groups(analyse(_read(folder / "study")))
    epoch = max(samples for group in groups.values() for samples in group["samples"].values())
    head = ["", "s per epoch, 1 rank", "s per epoch, 2 ranks", "% of scaling", "accuracy, 1 rank", "accuracy, 2 ranks"]
    rows = []
    for name in dict.fromkeys(name for name, _ in groups):
        on = [groups[name, ranks] for ranks in (1, 2)]
        head[0] = f"seeds {' and '.join(str(seed) for seed, _ in on[0].seeds)}"
        seconds = [[epoch * one for one in group.seconds_per_sample.values()] for group in on]
        percent = STUDY.percent(fmean(seconds[0]), 2, fmean(seconds[1]))
        times = [", ".join(f"{value:.1f}" for value in values) for values in seconds]
        accuracies = [", ".join(f"{value:.3f}" for value in group.final.values()) for group in on]
        rows.append([shown(name), *times, f"{percent:.1f}", *accuracies])
    one_s, two_s = STUDY.REPORTED_S[1], STUDY.REPORTED_S[2]
    reported = [f"{one_s:.2f}", f"{two_s:.2f}", f"{STUDY.percent(one_s, 2, two_s):.2f}"]
    return [head, *rows, ["reported, one and two GPUs", *reported, "", ""]]


def devices_epochs(folder: Path) -> Table:
    """Show the accuracy after each epoch on one rank, of both optimisers."""
    told = {"adam": "Adam, 0.001 (the job's own)", "sgd": "SGD, 0.03, momentum 0.9"}
    points = {name: _read(folder / name).runs[0].evaluations for name in told}
    epochs = [f"{number} epoch{'s' * (number > 1)}" for number in range(1, 1 + max(map(len, points.values())))]
    rows = [[told[name], *(f"{value:.4f}" for value in found["metric.accuracy"])] for name, found in points.items()]
    return [["1 rank, batch 64, seed 0", *epochs], *rows]


def recent(folder: Path) -> Table:
    """Set the loss at the end, and when the quickest ends, beside bytes and seconds to the target on all networks."""
    of_each = {path.parent.name: analyse(_read(path.parent)) for path in sorted(folder.glob("*/comparison.json"))}
    target = next(iter(of_each.values())).job.target
    real = _groups(of_each["4-real"]) if "4-real" in of_each else {}  # root alone can make such hosts
    networks = [*NETWORKS, *["real ranks"] * bool(real)]
    head = ["ranks", "strategy", "bits per byte at the end", "when the quickest ends", "kB per rank and step"]
    rows = [[*head, *(f"s to {target:g}, {name}" for name in networks)]]
    for ranks in (4, 16):
        slow, fast = ([_groups(of_each[f"{ranks}-{name}{kind}"]) for kind in KINDS] for name in NETWORKS.values())
        quickest = min(min(group["wall_s"].values()) for groups in slow for group in groups.values())
        for (kind, told), on_slow, on_fast in zip(KINDS.items(), slow, fast, strict=True):
            for key, group in on_slow.items():
                losses = _loss(group), _loss_after(group, quickest)
                on = (on_slow, on_fast, {} if kind else real)[: len(networks)]
                seconds = [_seconds(groups[key]) if key in groups else "" for groups in on]
                rows.append([str(ranks), shown(group.name) + told, *losses, short(_bytes(group) / 1e3), *seconds])
    return rows


def _loss(group: RunGroup) -> str:
    """Write the metric at the end."""
    return f"{interval(list(group.final.values())):.3f}"


def _loss_after(group: RunGroup, seconds: float) -> str:
    """Write what the metric was after so many seconds, on a line between two evaluations."""
    curves = [[(e.seconds, e.metrics[group.job.metric]) for e in one.run.evaluations] for one in group.ended]
    return f"{interval([float(np.interp(seconds, *zip(*curve))) for curve in curves]):.3f}"


def options(folder: Path) -> Table:
    """Set losses beside each other by an option of the strategies: a row with its values, and one for each strategy."""
    width = 4  # values
    rows = [["bits per byte at the end", *[""] * width]]
    for parts, option in OPTIONS.items():
        losses: dict[str, dict[str, str]] = {}
        for part in parts.split():
            for group in _in_order(analyse(_read(folder / part))):
                before, value, after = re.split(rf", {option} ([^,]+)", shown(group.name))
                losses.setdefault(before + after, {})[value] = _loss(group)
        values = sorted({value for of_values in losses.values() for value in of_values}, key=_size)
        empty = [""] * (width - len(values))
        rows.append([f"**{option}**", *values, *empty])
        rows += [[name, *(of_values.get(value, "") for value in values), *empty] for name, of_values in losses.items()]
    return rows


def slowmo(folder: Path) -> Table:
    """List the accuracies with a slow momentum, and without."""
    groups = _in_order(analyse(_read(folder)))
    return [["strategy", "accuracy in %"], *([shown(group.name), _accuracy(group)] for group in groups)]


def labels(folder: Path) -> Table:
    """Set accuracies beside each other by how unevenly labels are dealt out."""
    alphas, rows = ("0.1", "1", "10"), {}
    for kind, told in (("plain", ""), ("momentum", ", momentum 0.9")):
        for alpha in alphas:
            for group in _in_order(analyse(_read(folder / f"{kind}-{alpha}"))):
                rows.setdefault(shown(group.name) + told, []).append(_accuracy(group))
    head = ["accuracy in %", *(f"α = {alpha}" for alpha in alphas)]
    return [head, *([name, *accuracies] for name, accuracies in rows.items())]


TABLES: dict[str, Callable[[Path], Table]] = {
    "compression": compression,
    "modulation": modulation,
    "gossip": gossip,
    "slow-link": slow_link,
    "sandblaster": sandblaster,
    "recent": recent,
    "options": options,
    "slowmo": slowmo,
    "labels": labels,
    "devices": devices,
    "devices-epochs": devices_epochs,
    **bench_tables.TABLES,
}


# --- cells and how they are written -----------------------------------------------------------------------------------
def _read(folder: Path) -> JobRuns:
    (found,) = read_jobs([folder])  # all runs of a folder are of one job
    return found


def _in_order(findings: Analysis) -> list[RunGroup]:
    """List the cells that have a result by their names, the reference first, and `splits 4` before `splits 16`."""
    ended = [group for group in findings.groups if group.ended]
    return sorted(ended, key=lambda group: (group.name != findings.job.reference, _digits(group.name)))


def _size(value: str) -> tuple[float, str]:
    """Order numbers by size, and words by their letters."""
    return (float(value), "") if value[0].isdigit() else (0.0, value)


def _digits(name: str) -> list[str]:
    return [part.zfill(4) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _groups(findings: Analysis) -> dict[tuple[str, int], RunGroup]:
    return {(group.name, group.ranks): group for group in _in_order(findings)}


def shown(name: str) -> str:
    """Write a cell's name as pages do: `allreduce`, `topk`, ratio 0.01."""
    strategy, _, rest = name.partition(" (")
    options = [option.removeprefix("compression.") for option in rest.removesuffix(")").split(", ") if option]
    if options and options[0].startswith("compression "):
        options[0] = f"`{options[0].split()[1]}`"
    return ", ".join([f"`{strategy}`", *options])


def _bytes(group: RunGroup) -> float:
    """Average the bytes that all ranks sent and fetched in a step."""
    return fmean(group["bytes_per_step"].values())


def _target(findings: Analysis) -> str:
    return f"{100 * findings.job.target:.0f} %"


def _accuracy(group: RunGroup) -> str:
    return f"{interval([100 * value for value in group.final.values()]):.2f}"


def _contrast(findings: Analysis, group: RunGroup) -> Contrast | None:
    return next((found for found in findings.contrasts if found.group is group), None)


def _gap(findings: Analysis, group: RunGroup) -> str:
    """Write by how many points a cell's accuracy is above the reference's; nothing for that itself."""
    found = _contrast(findings, group)
    if found is None or found.difference is None:
        return ""
    return f"{found.difference.scaled(100):+.2f}{_star(found.p_difference)}"


def _seconds(group: RunGroup) -> str:
    """Write the seconds to the target, and how many runs met it where that is not all."""
    seconds = list(group.seconds_to_target.values())
    if not seconds:
        return "not reached"
    return f"{interval(seconds):.2f}{'' if group.all_reached else f' ({len(seconds)} of {group.n_started})'}"


def _megabytes(group: RunGroup) -> str:
    """Write what all ranks sent and fetched until the target."""
    spent = _spent(group)
    return short(fmean(spent)) if spent else "not reached"


def _megabytes_of_each(group: RunGroup) -> str:
    """Write the same with its interval: seeds need different numbers of steps."""
    spent = _spent(group)
    if len(spent) < 2:
        return _megabytes(group)
    found = interval(spent)
    return f"{short(found.mean)} ± {short(found.half)}"


def _spent(group: RunGroup) -> list[float]:
    """Return the megabytes of each run that met the target."""
    return [n_bytes / 1e6 for n_bytes in group["bytes_to_target"].values()]


def _sooner(findings: Analysis, group: RunGroup) -> str:
    """Write how many times sooner than the reference a cell met the target."""
    found = _contrast(findings, group)
    if found is None or found.speedup is None:
        return ""
    sooner = found.speedup
    if not sooner.low < sooner.high:  # one seed
        return f"{sooner.mean:.2f}"
    return f"{sooner.mean:.2f} ({sooner.low:.2f} to {sooner.high:.2f}){_star(found.p_speedup)}"


def _star(p: float) -> str:
    """Mark what is real; of fewer than three seeds there is no p."""
    return "*" * (p < SIGNIFICANT)


def main(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(TABLES)}.")],
    folder: Annotated[Path, typer.Argument(help="Of the part's runs.")],
    output: Annotated[Path, typer.Argument(help="The file to write, such as docs/data/NAME.csv.")],
) -> None:
    """Write a table as CSV."""
    with open(output, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(TABLES[name](folder))


if __name__ == "__main__":
    typer.run(main)
