"""The study from its runs to its answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from studies import run_with_progress

from hpcdist import console
from hpcdist.study import Run
from hpcdist.train import load_job
from regression_study import answer
from regression_study.protocols import JOB_SETUPS, RATE, Protocol, Results, Setup
from regression_study.training import JOB, train


def study(output: Path, workers: int, steps: int, seeds: int, epochs: int) -> None:
    """Makes the runs that are missing, prints the tables and the answer, and writes them to `output`.

    Args:
        workers: processes.
        steps: of the serial run.
        epochs: of the job as it is.
    """
    output.mkdir(parents=True, exist_ok=True)
    data = output / "friedman1.h5"
    if not data.exists():
        load_job(JOB).data(data)
    results = Results(steps, seeds)
    wanted: dict[Protocol | Setup, list[dict]] = dict(results.settings())
    wanted |= {setup: [setup.settings(epochs, seed) for seed in range(seeds)] for setup in JOB_SETUPS}
    every = [settings for of_one in wanted.values() for settings in of_one]
    runs = run_with_progress(partial(train, data), output / "runs.jsonl", workers, "all runs", every)
    in_order = iter(runs)
    found = {one: list(islice(in_order, seeds)) for one in wanted}
    results.runs = {one: of_one for one, of_one in found.items() if isinstance(one, Protocol)}
    of_job = {setup: [run.measured["rmse"] for run in found[setup]] for setup in JOB_SETUPS}

    title = f"RMSE on the test set, SGD at rate {RATE}, {seeds} seeds, 95 % intervals; in brackets minus the serial"
    tables = {
        f"{title} run's, * where that excludes 0": list(results.rows()),
        f"The job as it is, {epochs} epochs": [answer.job_row(setup, of_job) for setup in JOB_SETUPS],
    }
    for name, rows in tables.items():
        console.rows(name, rows)
    text = answer.paragraph(results, of_job, epochs)
    print(text)
    write(output, {"steps": steps, "tables": tables, "answer": text}, runs)
    print(f"\nwritten to {output}: runs.jsonl, results.json, answer.md", file=sys.stderr)


def write(output: Path, found: dict, runs: list[Run]) -> None:
    everything = {**found, "runs": [vars(run) for run in runs]}
    (output / "results.json").write_text(json.dumps(everything, indent=1, ensure_ascii=False), encoding="utf-8")
    parts = [f"{name}:\n\n{markdown(rows)}" for name, rows in found["tables"].items()]
    (output / "answer.md").write_text("\n\n".join([*parts, found["answer"]]) + "\n", encoding="utf-8")


def markdown(rows: Sequence[dict[str, str]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
