"""Which scales better, all-reduce or asynchronous training? Loss against virtual time on 4 to 128 workers.

    python jobs/scaling.py                  # about 15 minutes on 2 free cores; --quick: half a minute
    pip install -e '.[plots]'               # what it needs beside the library

The question of Peter H. Jin, Qiaochu Yuan, Forrest Iandola, Kurt Keutzer, "How to scale distributed deep learning?",
2016, who found that asynchronous methods, elastic averaging and gossip, converge faster on few nodes (to about 32), and
that synchronous all-reduce scales better to more (about 100) and converges most consistently. Here `allreduce`,
`easgd`, `gossip_pull` and `gossip_push` really train a model on a virtual cluster. What was chosen, and why:

- p is the number of workers, which all compute gradients; easgd's server comes on top. On 64 and 128 workers easgd is
  run with 4 servers too, for one server's link then has more to carry than it can.
- Budget: 4,096 gradients of all workers together, whatever strategy and p. They are handed out one by one, so that a
  slow worker takes fewer; with all-reduce every worker takes 4,096/p. Each is of 2 samples, so that a batch of all 128
  workers, 256, is about where larger ones stop to pay: with far larger ones nothing scales, with one sample all would.
- Data and model: scikit-learn's 1,797 digits, a quarter of them for testing; a perceptron with 32 hidden units, SGD
  with momentum 0.9 and a constant rate on every worker, without warm-up.
- Rates: for each strategy, p and target the power of 2 that gets there soonest, on two seeds of its own, found by
  trying neighbours until the best one's are worse. This contains linear scaling, and hands no strategy another's rate.
  Rates are chosen with stragglers and kept for even steps. easgd exchanges every 4 steps with β = 0.9, the library's
  choice: at every step one server's link would be full with 7 workers.
- Time: a step takes 0.2 s, varying by 10 % (gamma-distributed); with `stragglers` each step of each worker takes 4
  times as long with a probability of 1 %, with `even` none does. The network is 10 Gbit/s with 20 µs of latency for a
  ResNet-18 of 46.8 MB, scaled down with the model: one transfer of all parameters takes 37.4 ms. Nobody overlaps
  transfers with gradients, and arithmetic outside of gradients takes no time. A link carries one transfer after the
  other, so that a crowded server's short messages queue behind long ones: more than real switches make them wait.
- Loss: cross-entropy of the test set on what the workers stand for together (all-reduce's parameters, the mean of
  gossip's, easgd's centre), looked at every 32 gradients without any virtual time passing. There are two targets, of
  which the stricter one leaves time to make up for a slow beginning: 0.35, where about 9 % of the test images are
  wrong, and 0.2, where 5 % are.

The 26 cells are run with five seeds, which tuning does not see, with both kinds of steps and each target's rates: about
330 runs, for most rates are the same, beside about 190 for the rates. What is finished is kept in `runs.jsonl` and
`rates.jsonl` in the output folder and not repeated, as long as hpcdist's code is the same.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import islice, product
from pathlib import Path
from typing import Annotated

import typer
from scaling_study import tuning
from scaling_study.cells import QUICK, Grid, Results
from scaling_study.training import train
from studies import code, run_with_progress, write_csv

from hpcdist import console


def study(grid: Grid, output: Path, workers: int) -> tuple[list[Results], list[dict]]:
    """All runs, by steps and target, and the table of rates."""
    cells, stamp = grid.cells(), {"code": code()}
    wanted = [{**tuning.settings_of(cell, grid), **stamp} for cell in cells]
    tuned = run_with_progress(tuning.tune, output / "rates.jsonl", workers, "rates", wanted)
    of_all = []
    for steps, target in product(grid.steps, grid.targets):
        rates = [2.0 ** run.measured["best"][str(target)] for run in tuned]
        of_all.append(Results(grid, steps, target, dict(zip(cells, rates, strict=True))))
    wanted = [
        {**cell.settings(grid, results.steps), "rate": rate, "seed": seed, **stamp}
        for results in of_all
        for cell, rate in results.rates.items()
        for seed in range(grid.seeds)
    ]
    runs = iter(run_with_progress(train, output / "runs.jsonl", workers, "all cells", wanted))
    for results in of_all:
        results.runs = {cell: list(islice(runs, grid.seeds)) for cell in cells}
    return of_all, [row for cell, run in zip(cells, tuned, strict=True) for row in tuning.rows(cell, run.measured)]


def write(output: Path, of_all: list[Results], found: dict) -> None:
    """Everything in one file: tables, claims, and every run's settings and curve."""
    cells = [(results.target, runs) for results in of_all for runs in results.runs.values()]
    runs = [{"target": target, **vars(run)} for target, of_cell in cells for run in of_cell]
    everything = {**found, "grid": vars(of_all[0].grid), "runs": runs}
    (output / "results.json").write_text(json.dumps(everything, indent=1, ensure_ascii=False), encoding="utf-8")


def main(
    output: Annotated[Path, typer.Option(help="Folder for runs, tables, plots and claims.")] = Path("runs/scaling"),
    quick: Annotated[bool, typer.Option(help="A small grid that shows how it works, and little else.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    from scaling_study import claims, plots

    output.mkdir(parents=True, exist_ok=True)
    grid = QUICK if quick else Grid()
    of_all, tried = study(grid, output, workers)
    tables = {results.title: list(results.rows()) for results in of_all}
    for title, table in tables.items():
        console.rows(f"{title}; {grid.gradients} gradients, {grid.seeds} seeds, means with 95 % confidence", table)
    everything = [{"steps and target": title, **row} for title, table in tables.items() for row in table]
    write_csv(output / "table.csv", everything)
    write_csv(output / "rates.csv", tried)
    paragraphs = claims.paragraphs(of_all)
    text = "\n\n".join(paragraphs)
    print(text)
    (output / "claims.txt").write_text(text + "\n", encoding="utf-8")
    write(output, of_all, {"tables": tables, "claims": paragraphs, "rates": tried})
    files = ["runs.jsonl", "rates.jsonl", "table.csv", "rates.csv", "claims.txt", "results.json"]
    print(f"\nwritten to {output}: {', '.join(files + plots.draw(of_all, output))}", file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
