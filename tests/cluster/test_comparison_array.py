"""`hpcdist compare --slurm` and `hpcdist sweep --slurm` on Slurm: submitted, waited for, reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster import jobs
from hpcdist.records import load_summary
from hpcdist.tools.slurm import history

DIGITS = Path(__file__).parents[2] / "jobs" / "digits.py"
COMPARED = "--strategies allreduce,gossip_pull --seeds 1 --no-controls".split()
SLURM = "--slurm ./site.toml --slurm-set doctor=false --slurm-set ranks_per_node=1".split()


def settings(data: Path) -> list[str]:
    wanted = "--ranks 2 --evaluations 1 --budget samples=320 --output out".split()
    return [*wanted, "--set", f"data.path={json.dumps(str(data))}"]


@pytest.mark.extended
def test_a_comparison_is_an_array_and_its_report(cluster, workdir, data):
    jobs.write_site(workdir, "mpirun")
    given = [*COMPARED, *settings(data), *SLURM]
    job = cluster.run("hpcdist", "compare", DIGITS, *given, cwd=workdir, timeout_s=90).stdout.strip()
    for task in range(2):
        cluster.wait(f"{job}_{task}")
    done = cluster.run("hpcdist", "compare", "--output", "out", cwd=workdir, timeout_s=90)
    assert "2 of 2 runs are there already" in done.stderr and "gossip_pull" in done.stdout
    (entry,) = history.read(workdir / "out")
    found = {load_summary(workdir / folder).strategy for folder in entry.folders}
    assert found == {"allreduce", "gossip_pull"} and len(jobs.hosts(cluster.output(f"{job}_0"))) == 2
    assert "gossip_pull" in (workdir / "out" / "report" / "index.html").read_text()


@pytest.mark.extended
def test_a_sweep_is_an_array_whose_tasks_draw_their_settings(cluster, workdir, data):
    jobs.write_site(workdir, "mpirun")
    given = ["--over", "batch_size=16,32", "--sampler", "grid", *settings(data), *SLURM]
    job = cluster.run("hpcdist", "sweep", DIGITS, *given, cwd=workdir, timeout_s=90).stdout.strip()
    for task in range(2):
        cluster.wait(f"{job}_{task}")
    done = cluster.run("hpcdist", "sweep", "--output", "out", cwd=workdir, timeout_s=90)
    assert "all runs are in out" in done.stderr
    trials = json.loads((workdir / "out" / "sweep.json").read_text())["trials"]
    assert sorted(trial["settings"]["batch_size"] for trial in trials) == ["16", "32"]
    (entry,) = history.read(workdir / "out")
    assert [load_summary(workdir / folder).ranks for folder in entry.folders] == [2, 2]
    assert len(jobs.hosts(cluster.output(f"{job}_0"))) == 2
