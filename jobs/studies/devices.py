"""One against two and four devices: accuracy, time, percent of scaling and power of the network of the tutorials.

    python jobs/studies/devices.py          # ten minutes on 2 free cores; --quick: two

`hpcdist compare` trains jobs/mnist.py for one pass over its 60,000 images, on 1, 2 and 4 ranks with a batch of 64 each:

- `allreduce`, which is what TensorFlow's mirrored and multi-worker mirrored strategies do;
- `parameter_server`, asynchronous, whose parameters the workers hold in shares, so that p ranks are p workers;
- `gossip_pull`.

A rank has one thread, and on a machine with GPUs one of these. The percent of scaling is 100 T₁ / (p T_p), where T_p is
the time of an epoch on p ranks, without evaluations. The study that this one follows reports 109.47 s for 30 epochs on
one GPU and 78.61 s on two: 69.63 %. Under Slurm: `--slurm SITE` submits the runs, and the command without it shows what
has come of them; or in an allocation, `--launcher "srun --mpi=pmix -n"`.

The folder holds the runs, as `hpcdist compare` leaves them, its report with the curves of accuracy and loss, and this
study's table. What is there is not made again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from hpcdist.records import Summary
from hpcdist.tools.runs import Run, find_runs, read_comparison
from hpcdist.tools.statistics import interval
from kit.output import Study, markdown, wrap

JOB = Path(__file__).parents[1] / "mnist.py"
STRATEGIES = ("allreduce", "parameter_server:servers=colocated", "gossip_pull")
EPOCH = 60_000  # images to train on, of MNIST and of Fashion-MNIST
REPORTED_S = {1: 109.47 / 30, 2: 78.61 / 30}  # an epoch of 30, on so many GPUs


@dataclass(frozen=True)
class Trained:
    """The runs of one strategy on so many ranks, one for each seed."""

    name: str
    ranks: int
    summaries: Sequence[Summary]

    @property
    def epoch_s(self) -> list[float]:
        """Compute the seconds of training that each run took per epoch."""
        return [summary.wall_s * EPOCH / summary.samples for summary in self.summaries]

    @property
    def watts(self) -> list[float] | None:
        """Compute the mean power of each run; None where it was not measured."""
        if any(summary.energy.joules is None for summary in self.summaries):
            return None
        return [summary.energy.joules / summary.wall_s for summary in self.summaries]


def percent(one_s: float, ranks: int, ranks_s: float) -> float:
    """Compute the percent of scaling."""
    return 100 * one_s / (ranks * ranks_s)


def read(folder: Path) -> list[Trained]:
    """Read the runs of a comparison that have ended, in the order of the strategies' names and of ranks."""
    groups: dict[tuple[str, int], list[Summary]] = {}
    for run in (read_comparison(folder) or {"runs": []})["runs"]:
        if (summary := Run(folder / run["folder"], follow=True).summary) is not None:
            groups.setdefault((run["name"], run["ranks"]), []).append(summary)
    return [Trained(name, ranks, found) for (name, ranks), found in sorted(groups.items())]


def rows(found: Sequence[Trained], cores: int) -> list[dict[str, Any]]:
    """Make the table, with 95 % intervals over the seeds; ranks that share cores say so beside the percent."""
    alone = {one.name: one.epoch_s for one in found if one.ranks == 1}
    return [_row(one, alone.get(one.name), cores) for one in found]


def _row(one: Trained, alone: Sequence[float] | None, cores: int) -> dict[str, Any]:
    scaling = "not measured"
    if alone:
        scaling = f"{percent(fmean(alone), one.ranks, fmean(one.epoch_s)):.1f}"
        scaling += f" ({one.ranks} ranks on {cores} cores)" if one.ranks > cores else ""
    return {
        "strategy": one.name,
        "ranks": one.ranks,
        "accuracy": f"{interval([summary.metrics['accuracy'] for summary in one.summaries]):.4f}",
        "s per epoch": f"{interval(one.epoch_s):.1f}",
        "samples/s": f"{EPOCH / fmean(one.epoch_s):.0f}",
        "% of scaling": scaling,
        "W": "not measured" if one.watts is None else f"{interval(one.watts):.0f}",
    }


def answer(found: Sequence[Trained], data: str) -> str:
    """Say in a paragraph how training on two devices compares with one, beside the reported numbers."""
    epochs: Mapping[tuple[str, int], list[float]] = {(one.name, one.ranks): one.epoch_s for one in found}
    reported = percent(REPORTED_S[1], 2, REPORTED_S[2])
    parts = []
    for one in found:
        alone = epochs.get((one.name, 1))
        if one.ranks == 2 and alone:
            times = f"{fmean(alone):.1f} s and {fmean(one.epoch_s):.1f} s per epoch"
            parts.append(f"{one.name} {percent(fmean(alone), 2, fmean(one.epoch_s)):.1f} % ({times})")
    told = "; ".join(parts) or "no strategy has run on both"
    return wrap(
        f"Data: {data}. Percent of scaling from one rank to two: {told}. Reported on one and two GPUs: "
        f"{reported:.2f} % ({REPORTED_S[1]:.2f} s and {REPORTED_S[2]:.2f} s per epoch)."
    )


def _source(folder: Path) -> str:
    """Name the data set that the runs were trained on."""
    runs = [Run(path, follow=True) for path in find_runs([folder / "runs"])]
    return " and ".join(sorted({str(run.settings["data"].get("source")) for run in runs if run.settings})) or "unknown"


def main(
    output: Annotated[Path, typer.Option(help="Folder for runs, report and table.")] = Path("runs/devices"),
    quick: Annotated[bool, typer.Option(help="A tenth of an epoch: how it works, and no answer.")] = False,
    ranks: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of ranks.")] = "1,2,4",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each strategy on each number of ranks.")] = 1,
    samples: Annotated[int | None, typer.Option(min=1, help="Images to train on in each run.")] = None,
    launcher: Annotated[str | None, typer.Option(metavar="COMMAND", help="Starts ranks, up to their number.")] = None,
    slurm: Annotated[str | None, typer.Option(metavar="SITE", help="Submit the runs as Slurm's job arrays.")] = None,
    slurm_set: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Setting of these jobs.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Setting of all runs, of the job's.")
    ] = None,
) -> None:
    """Make the runs that are missing, and say what they show."""
    samples = samples or (EPOCH // 10 if quick else EPOCH)
    command = [sys.executable, "-m", "hpcdist", "compare", str(JOB), "--strategies", ",".join(STRATEGIES)]
    command += ["--ranks", ranks, "--seeds", str(seeds), "--budget", f"samples={samples}", "--evaluations", "4"]
    command += ["--no-controls", "--output", str(output), *(["--launcher", launcher] if launcher else [])]
    command += ["--slurm", slurm] if slurm else []
    for option, settings in (("--slurm-set", slurm_set), ("--set", overrides)):
        command += [word for setting in settings or [] for word in (option, setting)]
    status = subprocess.run(command).returncode
    found = read(output)
    if not found:
        raise typer.Exit(status)
    study = Study(output)
    table = study.table(f"After {samples:,} images, means and 95 % intervals", rows(found, os.cpu_count() or 1))
    print(text := answer(found, _source(output)))
    study.write_csv("devices.csv", table)
    study.file("answer.md").write_text(f"{markdown(table)}\n\n{text}\n", encoding="utf-8")
    raise typer.Exit(status)


if __name__ == "__main__":
    typer.run(main)
