"""Virtual ranks beside EXO Gym, which trains with a process per node: the same numbers? how long, in how much memory?

    PYTHONPATH=PATH_OF_EXO_GYM python jobs/studies/exo_gym.py    # 20 minutes on 2 free cores; --quick: 4 minutes
    git clone https://github.com/exo-explore/gym && pip install einops tqdm    # what it needs

Each training is a process of its own, with one thread for each node: 200 steps of a small perceptron on scikit-learn's
digits. Seconds are those of the whole command, imports included; memory is the most that its processes have at one
time, where what several of them map counts in parts. Both take turns; medians are shown.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import torch
import typer

import exo_gym_job
from hpcdist.errors import ConfigError
from kit.output import Study, start

JOB = Path(__file__).with_name("exo_gym_job.py")
BOTH = ("hpcdist", "exo-gym")
AGREEMENT = ("allreduce", "local_sgd", "local_sgd, mended", "diloco", "diloco, mended", "sparta", "demo", "own")
RUNS = {4: 3, 16: 3, 64: 1}  # by nodes, of each of both
FEW = 4  # nodes on which parameters are compared
LIMIT_S = 1800


@dataclass(frozen=True)
class Training:
    """What one training left, and took."""

    loss: float
    parameters: torch.Tensor  # all of them, flat
    seconds: float
    megabytes: float


def run(by: str, name: str, nodes: int, seed: int, folder: Path) -> Training:
    """Train in a process of its own, and look how much memory that and its children have, 20 times a second."""
    file = folder / f"{by}-{name.replace(', ', '-')}-{nodes}-{seed}.pt"
    command = [sys.executable, str(JOB), by, name, str(nodes), str(seed), str(file.resolve())]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    log, began, most = file.with_suffix(".log"), time.perf_counter(), 0
    with open(log, "w") as out:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None:
            most = max(most, _resident(process.pid))
            if time.perf_counter() - began > LIMIT_S:
                for one in (*psutil.Process(process.pid).children(recursive=True), process):
                    one.kill()
            time.sleep(0.05)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise ConfigError(f"{by} must train {name} on {nodes} nodes; got status {process.returncode}. Read {log}.")
    return Training(**torch.load(file), seconds=seconds, megabytes=most / 1e6)


def _resident(pid: int) -> int:
    """Add up the proportional set sizes, in bytes, of a process and of all that it has begun."""
    total = 0
    try:
        above = psutil.Process(pid)
        for process in (above, *above.children(recursive=True)):
            total += process.memory_full_info().pss
    except psutil.Error:  # one of them has just ended
        return 0
    return total


def agreement(name: str, seeds: int, folder: Path) -> dict[str, Any]:
    """Make a row: both losses, and the largest difference of the parameters beside their norm, of all seeds."""
    ours = [run("hpcdist", name.partition(",")[0], FEW, seed, folder) for seed in range(seeds)]
    theirs = [run("exo-gym", name, FEW, seed, folder) for seed in range(seeds)]
    apart = max(
        ((one.parameters - other.parameters).norm() / other.parameters.norm()).item()
        for one, other in zip(ours, theirs, strict=True)
    )
    return {
        "strategy": name,
        "loss, hpcdist": f"{median(one.loss for one in ours):.4f}",
        "loss, EXO Gym": f"{median(one.loss for one in theirs):.4f}",
        "parameters apart": f"{apart:.1e}",
    }


def cost(nodes: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Make a row: what diloco takes on so many nodes, and how many times more EXO Gym does."""
    found: dict[str, list[Training]] = {by: [] for by in BOTH}
    for _ in range(repeats):
        for by in BOTH:
            found[by].append(run(by, "diloco", nodes, 0, folder))
    row: dict[str, Any] = {"nodes": nodes}
    for key, unit in (("seconds", "s"), ("megabytes", "MB")):
        ours, theirs = (median(getattr(one, key) for one in found[by]) for by in BOTH)
        row |= {
            f"{unit}, hpcdist": f"{ours:.1f}",
            f"{unit}, EXO Gym": f"{theirs:.1f}",
            f"{unit}, times": f"{theirs / ours:.1f}",
        }
    return row


def lines(kind: type) -> int:
    """Count the lines of a class that are neither empty nor its documentation."""
    source = inspect.getsource(kind)
    return sum(bool(line.strip()) and not line.strip().startswith('"""') for line in source.splitlines())


def main(
    output: Annotated[Path, typer.Option(help="Folder for parameters and tables.")] = Path("runs/exo-gym"),
    quick: Annotated[bool, typer.Option(help="One seed, and 4 nodes alone.")] = False,
) -> None:
    """Train with both, and show what differs."""
    if importlib.util.find_spec("exogym") is None:
        raise ConfigError("the package `exogym` must be there; got none. Clone it, and put its folder into PYTHONPATH.")
    from kit import exo_gym

    study = Study(output)
    seeds, runs = (1, {FEW: 1}) if quick else (3, RUNS)
    agreed = [agreement(name, seeds, output) for name in AGREEMENT]
    study.write_csv("agreement.csv", study.table(f"{FEW} nodes, {exo_gym_job.STEPS} steps, {seeds} seeds", agreed))
    costs = [cost(nodes, repeats, output) for nodes, repeats in runs.items()]
    study.write_csv("cost.csv", study.table(f"diloco, medians of {', '.join(map(str, runs.values()))} runs", costs))
    own = {"hpcdist": lines(exo_gym_job.Averaged), "EXO Gym": lines(exo_gym.Averaged)}
    study.table("lines of a strategy that averages every so many steps", [own])
    study.end([])


if __name__ == "__main__":
    start(main)
