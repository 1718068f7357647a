"""`hpcdist compare --slurm` on Slurm: submitted, waited for, reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster import jobs
from hpcdist.records import load_summary
from hpcdist.tools.slurm import history

WANTED = "--strategies allreduce,gossip_pull --ranks 2 --seeds 1 --no-controls --evaluations 1".split()


@pytest.mark.extended
def test_a_comparison_is_an_array_and_its_report(cluster, workdir, data):
    jobs.write_site(workdir, "mpirun")
    wanted = [*WANTED, "--budget", "samples=320", "--set", f"data.path={json.dumps(str(data))}", "--output", "out"]
    slurm = ["--slurm", "./site.toml", "--slurm-set", "doctor=false", "--slurm-set", "ranks_per_node=1"]
    digits = Path(__file__).parents[2] / "jobs" / "digits.py"
    job = cluster.run("hpcdist", "compare", digits, *wanted, *slurm, cwd=workdir, timeout_s=90).stdout.strip()
    for task in range(2):
        cluster.wait(f"{job}_{task}")
    done = cluster.run("hpcdist", "compare", "--output", "out", cwd=workdir, timeout_s=90)
    assert "2 of 2 runs are there already" in done.stderr and "gossip_pull" in done.stdout
    (entry,) = history.read(workdir / "out")
    found = {load_summary(workdir / folder).strategy for folder in entry.folders}
    assert found == {"allreduce", "gossip_pull"} and len(jobs.hosts(cluster.output(f"{job}_0"))) == 2
    assert "gossip_pull" in (workdir / "out" / "report" / "index.html").read_text()
