"""Which strategy trains soonest on a slow network, measured on one, and whether virtual ranks foretell it.

    python jobs/network.py                  # a quarter of an hour on 2 free cores, as root; --quick: a minute
    pip install -e '.[plots]'               # what it needs beside the library; and iproute2 (ip, tc)

Real ranks on hosts of their own, which this job makes on this machine: namespaces with an address each, joined by TCP
over cables of 1 Gbit/s or 100 Mbit/s, with and without 10 ms from one host to another (`network_study/hosts.py`). What
was chosen, and why:

- A multi-layer perceptron of 9.8 million parameters, 39 MB, on scikit-learn's 1,797 digits: large for its task, so that
  it is there after a few steps, and a step's gradient is 39 MB all the same. SGD with momentum 0.9 on every rank,
  batches of 64, at a rate at which 4 ranks learn about as fast as they can.
- Time to the target: the seconds of training, by the wall clock, until the ranks classify 85 % of the test set rightly,
  each by its own parameters, on average. They look every few steps; what that takes, and setting up, for which the
  cables are fast, is not counted. The figure is that of the first look at or above the target, so the target itself was
  reached up to `- s` seconds before.
- The virtual cluster's prediction: the same training for as many steps on virtual ranks, on a network of the latency
  and the bandwidth that messages of known length have had there just before; each step computes as long as it did on
  the real rank. What a transfer costs the processor is not in it.

Runs that are finished are kept in `runs.jsonl` in the output folder and not repeated, as long as hpcdist's code is the
same.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from network_study.hosts import Cable, hosts, why_not
from network_study.results import Outcome, Results
from network_study.setups import QUICK, Scale
from network_study.training import predict, write_data
from studies import code, run_with_progress, write_csv

from hpcdist import console
from hpcdist.config.compare import fingerprint
from hpcdist.study import Run
from hpcdist.study.pool import read_runs

JOBS = Path(__file__).parent
TIME_LIMIT_S = 1800  # of all runs on one network


def measure(wanted: list[dict], data: Path, path: Path) -> list[Run]:
    """The runs wanted, on real ranks: those of one network in one job. What `path` holds already is not run again."""

    def done() -> dict[str, Run]:
        return {fingerprint(run.settings): run for run in read_runs(path)}

    missing = [settings for settings in wanted if fingerprint(settings) not in done()]
    for network in {json.dumps(settings["network"]): None for settings in missing}:
        here = [settings for settings in missing if settings["network"] == json.loads(network)]
        cable, size = Cable(**here[0]["network"]), here[0]["hosts"]
        with tempfile.TemporaryDirectory() as folder, hosts(Path(folder), size, cable) as made:
            (made.folder / "wanted.json").write_text(json.dumps(here))
            arguments = [JOBS / "network_study" / "ranks.py", made.folder, data, path, made.folder / "wanted.json"]
            job = made.launch(arguments, timeout_s=TIME_LIMIT_S, capture=False)
        if job.returncode != 0:
            sys.exit(f"error: the ranks must end well; they ended with {job.returncode}. What they wrote is above.")
    found = done()
    return [found[fingerprint(settings)] for settings in wanted]


def study(scale: Scale, size: int, output: Path, workers: int) -> Results:
    """All runs on real ranks, one after the other; then as many on virtual ranks, beside each other."""
    data = output / "digits.pt"
    if not data.exists():
        write_data(data)
    wanted = [{**settings, "code": code()} for settings in scale.settings(size)]
    runs = measure(wanted, data, output / "runs.jsonl")
    known = ("steps", "computing_s", "latency_s", "bandwidth_bytes_s")
    ahead = [{**run.settings, **{name: run.measured[name] for name in known}} for run in runs]
    found = run_with_progress(partial(predict, data), output / "predictions.jsonl", workers, "virtual ranks", ahead)
    return Results([Outcome(*pair) for pair in zip(runs, found, strict=True)])


def main(
    output: Annotated[Path, typer.Option(help="Folder for runs, table and figure.")] = Path("runs/network"),
    quick: Annotated[bool, typer.Option(help="A small model on one network: shows how it works.")] = False,
    size: Annotated[int, typer.Option("--hosts", min=2, max=4, help="Hosts, with one rank each.")] = 4,
    workers: Annotated[int, typer.Option(min=1, help="Processes for virtual ranks.")] = os.cpu_count() or 1,
) -> None:
    scale = QUICK if quick else Scale()
    for cable in scale.networks:
        if reason := why_not(cable):
            sys.exit(f"error: this job must be able to make hosts on this machine; {reason}.")
    output.mkdir(parents=True, exist_ok=True)
    output = output.resolve()  # hosts share files, and the ranks' folder may be another
    results = study(scale, size, output, workers)
    table = list(results.rows())
    console.rows("what messages had", list(results.network_rows()))
    console.rows(f"{size} hosts, target {scale.target:.0%}, looked at every {scale.every} steps", table)
    write_csv(output / "table.csv", table)
    print(text := results.text())
    (output / "claims.txt").write_text(text + "\n", encoding="utf-8")
    results.draw(output / "network.png")
    print(f"\nwritten to {output}: runs.jsonl, predictions.jsonl, table.csv, claims.txt, network.png", file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
