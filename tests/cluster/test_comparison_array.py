"""`hpcdist compare --slurm` and `hpcdist sweep --slurm` on Slurm: submitted, waited for, reported."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cluster import jobs
from hpcdist.records import Summary, load_summary
from hpcdist.tools.slurm import history

DIGITS = Path(__file__).parents[2] / "jobs" / "digits.py"
COMPARED = "--strategies allreduce,gossip_pull --seeds 1 --no-controls".split()
SLURM = "--slurm ./site.toml --slurm-set doctor=false --slurm-set ranks_per_node=1".split()


def settings(data: Path) -> list[str]:
    wanted = "--ranks 2 --evaluations 1 --budget samples=320 --output out".split()
    return [*wanted, "--set", f"data.path={json.dumps(str(data))}"]


@pytest.mark.extended
def test_comparisons_and_sweeps_are_arrays(cluster, new_folder, data):
    compared, swept = (new_folder(name) for name in ("compare", "sweep"))
    over = ["--over", "batch_size=16,32", "--sampler", "grid"]
    submitted = []
    for command, given, folder in (("compare", COMPARED, compared), ("sweep", over, swept)):
        jobs.write_site(folder, "mpirun")
        arguments = [DIGITS, *given, *settings(data), *SLURM]
        done = cluster.run("hpcdist", command, *arguments, cwd=folder, timeout_s=90)
        submitted.append(done.stdout.strip())

    def ended(command: str, job: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], list[Summary]]:
        """What the command says when both tasks have ended, and their summaries."""
        for task in range(2):
            cluster.wait(f"{job}_{task}")
        assert len(jobs.hosts(cluster.output(f"{job}_0"))) == 2
        done = cluster.run("hpcdist", command, "--output", "out", cwd=folder, timeout_s=90)
        (entry,) = history.read(folder / "out")
        return done, [load_summary(folder / place) for place in entry.folders]

    done, found = ended("compare", submitted[0], compared)
    assert "2 of 2 runs are there already" in done.stderr and "gossip_pull" in done.stdout
    assert {one.strategy for one in found} == {"allreduce", "gossip_pull"}
    assert "gossip_pull" in (compared / "out" / "report" / "index.html").read_text()
    done, found = ended("sweep", submitted[1], swept)
    assert "all runs are in out" in done.stderr and [one.ranks for one in found] == [2, 2]
    trials = json.loads((swept / "out" / "sweep.json").read_text())["trials"]
    assert sorted(trial["settings"]["batch_size"] for trial in trials) == ["16", "32"], "each task drew its own"


SCRIPT = """
import argparse

import torch
from torch import nn

import hpcdist as hd

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
options = parser.parse_args()
hd.init()
model = nn.Linear(4, 1)
optimizer = hd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=options.lr), model)
x = torch.ones(64, 4)
for batch in hd.shard(torch.utils.data.DataLoader(x, batch_size=8)):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
hd.finish(model)
hd.log_metrics({"loss": loss.item()})
"""


@pytest.mark.extended
def test_a_script_is_compared_by_an_array(cluster, new_folder):
    folder = new_folder("script")
    jobs.write_site(folder, "mpirun")
    (folder / "train.py").write_text(SCRIPT)
    options = [*COMPARED, "--ranks", "2", "--output", "out", *SLURM, "--", "--lr", "0.01"]
    job = cluster.run("hpcdist", "compare", "train.py", *options, cwd=folder, timeout_s=90).stdout.strip()
    for task in range(2):
        cluster.wait(f"{job}_{task}")
    done = cluster.run("hpcdist", "compare", "--output", "out", cwd=folder, timeout_s=90)
    assert "2 of 2 runs are there already" in done.stderr, cluster.output(f"{job}_0")
    (entry,) = history.read(folder / "out")
    found = [load_summary(folder / place) for place in entry.folders]
    assert {(one.strategy, one.ranks) for one in found} == {("allreduce", 2), ("gossip_pull", 2)}
