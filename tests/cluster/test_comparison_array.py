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
