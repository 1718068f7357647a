"""How staleness, batch and number of learners trade accuracy against time: a systematic study on virtual ranks.

    python jobs/staleness.py                # about 15 minutes on 2 busy cores; --quick: half a minute
    pip install -e '.[plots]'               # what it needs beside the library

After Suyog Gupta, Wei Zhang, Fei Wang, "Model accuracy and runtime tradeoff in distributed deep learning: a systematic
study", 2016: real training of a real model on real data, with the protocols hardsync, n-softsync and async (n = λ), λ
learners and one server on a virtual cluster, batches of μ per learner. What was chosen, and why:

- Data: scikit-learn's 1,797 digits, half of them for testing, so that a point of error is 9 images; pixels standardised
  by mean and deviation of the training set. A multi-layer perceptron with 32 hidden units: without batch normalisation,
  whose buffers no server averages, and without dropout.
- Budget: every run computes the gradients of the same number of samples, whatever μ, λ and protocol: 16 passes over the
  training set, shuffled together as one epoch, because a learner of the paper does not wait at an epoch's end.
- SGD with momentum β = 0.9 on the server, as in the paper. The rate α₀ is measured: one learner with batch B = 128 runs
  at effective rates α/(1 − β) from 1/8 to 8, on seeds of its own, and the smallest within a point of the best error is
  taken. Not the best, because staleness narrows what is stable: with curvature h a fresh gradient's rate may be up to
  2(1 + β)/h, that of one which is one update old (1 − β)/h, 38 times less. Hardsync uses α₀·√(μλ/B), n-softsync α₀,
  divided by n or by each gradient's staleness where it is modulated.
- Time: a step takes 2 ms and 0.25 ms per sample, so that a batch of 8 costs as much as its overhead; it varies by 20 %
  (gamma-distributed, independent between steps: no learner is always slow). The network: 20 µs, 10 Gbit/s per link. The
  server's arithmetic takes no virtual time.

Runs that are finished are kept in `runs.jsonl` in the output folder and not repeated, as long as hpcdist's code is the
same: who sends how many messages when changes every figure.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from staleness_study.grid import BASELINE, QUICK, Cell, Grid, Results
from studies import code, run_with_progress, write_csv
from torch import nn

from hpcdist import console
from hpcdist.comm.virtual import Jitter, Network, run_virtual
from hpcdist.config import JobConfig
from hpcdist.data.writer import Split, create
from hpcdist.study import Run, interval
from hpcdist.train import Job, Metric, Trainer, accuracy

RATES = tuple(2.0**power for power in range(-3, 4))  # α/(1 − β)
TOLERANCE = 1.0  # points of error by which the rate's may be above the best one's
BASELINE_SEED = 1000  # the first of the seeds on which the rate is chosen
FIXED = {
    "hidden": 32,
    "step_s": 2e-3,
    "sample_s": 0.25e-3,
    "latency_s": 20e-6,
    "bandwidth_bytes_s": 1.25e9,
}


# --- one run ----------------------------------------------------------------------------------------------------------
def write_data(path: Path, passes: int) -> None:
    """The digits: a training set that holds each sample `passes` times, and the test set."""
    digits = load_digits()
    x, y = digits.images.astype(np.uint8)[:, np.newaxis], digits.target.astype(np.int64)
    train, test = train_test_split(np.arange(len(y)), test_size=0.5, random_state=0, stratify=y)
    repeated, mean, deviation = np.tile(train, passes), x[train].mean(), x[train].std()
    create(
        path,
        {"train": Split.of(x[repeated], y[repeated]), "test": Split.of(x[test], y[test])},
        task="classification",
        source="scikit-learn, load_digits",
        classes=[str(name) for name in digits.target_names],
        scale=1 / deviation,
        offset=-mean / deviation,
    )


def model(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def settings_of(cell: Cell, grid: Grid, momentum: float, rate: float, seed: int) -> dict:
    """All that a run depends on."""
    changing = {"passes": grid.passes, "momentum": momentum, "rate": cell.rate(rate), "seed": seed}
    return {**vars(cell), **FIXED, **changing, "code": code()}


def train(data: Path, settings: dict) -> dict:
    """One run on a virtual cluster of a server and λ learners."""
    started_s, learners, batch, seed = time.perf_counter(), settings["learners"], settings["batch"], settings["seed"]
    strategy = {"name": "hardsync"}
    if settings["splits"]:
        strategy = {"name": "softsync", "splits": settings["splits"], "modulation": settings["modulation"]}
    prepare = partial(write_data, passes=settings["passes"])
    job = Job(model, nn.functional.cross_entropy, {"accuracy": Metric(accuracy)}, prepare)
    config = JobConfig(
        strategy={**strategy, "on_nonfinite": "ignore"},  # a run that diverges is measured to its end
        optimizer={"name": "SGD", "lr": settings["rate"], "momentum": settings["momentum"]},
        data={"path": str(data)},
        model={"hidden": settings["hidden"]},
        batch_size=batch,
        seed=seed,
    )
    with tempfile.TemporaryDirectory() as folder:

        def body(comm):
            trainer = Trainer(job, config, comm, Path(folder), None)
            summary = trainer.run()
            trainer.close()
            return summary, trainer.strategy.clock

        (summary, updates), *_ = run_virtual(
            body,
            1 + learners,
            seed=seed,
            network=Network(settings["latency_s"], settings["bandwidth_bytes_s"]),
            compute=Jitter(settings["step_s"] + settings["sample_s"] * batch, settings["jitter"]),
        )
    return {
        "error": 1 - summary.metrics["accuracy"],
        "loss": summary.metrics["loss"],
        "virtual_s": summary.wall_s,
        "updates": updates,
        "samples": summary.samples,
        "staleness_mean": summary.staleness.mean,
        "staleness_max": summary.staleness.max,
        "staleness_histogram": summary.staleness.histogram,
        "real_s": time.perf_counter() - started_s,
    }


# --- the study --------------------------------------------------------------------------------------------------------
def choose_rate(spread: Callable[[list[dict]], list[Run]], grid: Grid, momentum: float) -> tuple[float, list[dict]]:
    """α₀, and the table of errors that it was chosen by."""
    rates, seeds = [rate * (1 - momentum) for rate in RATES], range(BASELINE_SEED, BASELINE_SEED + grid.seeds)
    runs = spread([settings_of(BASELINE, grid, momentum, rate, seed) for rate in rates for seed in seeds])
    errors = {rate: interval([100 * r.measured["error"] for r in runs if r.settings["rate"] == rate]) for rate in rates}
    best = min(error.mean for error in errors.values())
    chosen = min(rate for rate, error in errors.items() if error.mean <= best + TOLERANCE)
    rows = [{"rate": rate, "error %": f"{error:.2f}", "": "α₀" * (rate == chosen)} for rate, error in errors.items()]
    return chosen, rows


def study(grid: Grid, momentum: float, output: Path, workers: int) -> tuple[Results, list[dict]]:
    """All runs, and the table of rates."""
    data = output / f"digits-{grid.passes}-passes.h5"
    if not data.exists():
        write_data(data, grid.passes)
    spread = partial(run_with_progress, partial(train, data), output / "runs.jsonl", workers)
    rate, rates = choose_rate(partial(spread, "one learner"), grid, momentum)
    cells = grid.cells()
    runs = iter(
        spread("all cells", [settings_of(c, grid, momentum, rate, seed) for c in cells for seed in range(grid.seeds)])
    )
    return Results(grid, rate, {cell: list(islice(runs, grid.seeds)) for cell in cells}), rates


def main(
    output: Annotated[Path, typer.Option(help="Folder for runs, table, plots and claims.")] = Path("runs/staleness"),
    quick: Annotated[bool, typer.Option(help="A small grid that shows how it works, and little else.")] = False,
    momentum: Annotated[float, typer.Option(min=0, max=0.99, help="Of the server's SGD.")] = 0.9,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    from staleness_study import claims, plots

    output.mkdir(parents=True, exist_ok=True)
    grid = QUICK if quick else Grid()
    results, rates = study(grid, momentum, output, workers)
    table = list(results.rows())
    console.rows("one learner, batch 128", rates)
    budget = f"{grid.passes} passes, {grid.seeds} seeds, momentum {momentum:g}, α₀ = {results.rate:g}"
    console.rows(f"{budget}; means with 95 % confidence", table)
    write_csv(output / "table.csv", table)
    runs = [{**run.settings, **run.measured} for of_cell in results.runs.values() for run in of_cell]
    write_csv(output / "runs.csv", [{k: v for k, v in run.items() if k != "staleness_histogram"} for run in runs])
    text = "\n\n".join(claims.paragraphs(results))
    print(text)
    (output / "claims.txt").write_text(text + "\n", encoding="utf-8")
    files = plots.draw(results, output)
    print(f"\nwritten to {output}: runs.jsonl, runs.csv, table.csv, claims.txt, {', '.join(files)}", file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
