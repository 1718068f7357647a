"""The template of each shape, through Slurm, on nodes that share nothing but files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from cluster import jobs
from hpcdist.records import load_summary, read_records

HERE = Path(__file__).parent
TINY = str(HERE.parent / "train" / "tiny.py")
TRANSFORMER = str(HERE.parents[1] / "jobs" / "transformer.py")
IN_BLOCKS, DEALT_OUT = ["n1", "n1", "n2", "n2"], ["n1", "n2", "n1", "n2"]
SERVED = {"shape": "parameter_server", "job": TINY}
FEW = ["data.path='python-reference.h5'", "model.width=16", "model.blocks=2", "budget.steps=5"]


class Submitted(NamedTuple):
    """How ranks are started, the specification; the host of each rank, the strategy, and the hosts of its servers."""

    how: str
    spec: dict
    hosts: list[str]
    strategy: str
    serving: list[str] = []


JOBS = {  # each on two nodes, with two ranks on each
    "server-on-first": Submitted(
        "mpirun", {**SERVED, "servers": 1, "gpus_per_rank": 1}, IN_BLOCKS, "parameter_server", ["n1"]
    ),  # GPUs are asked for and dealt out; there is none to compute on
    "server-on-each": Submitted(
        "srun-pmix", {**SERVED, "servers": 2, "servers_on": "one_per_node", "doctor": True}, DEALT_OUT,
        "parameter_server", ["n1", "n2"],
    ),
    "gossip": Submitted("srun-pmi2", {"shape": "gossip", "job": TINY}, IN_BLOCKS, "gossip_pull"),
    "stages": Submitted(
        "mpiexec", {"shape": "hybrid", "gpus_per_rank": 0, "strategy": "gossip_pull", "job": TRANSFORMER,
                    "settings": FEW}, IN_BLOCKS, "gossip_pull",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_ranks_and_servers_run_where_the_job_says(cluster, new_folder, data, name):
    """One job after the other: the doctor's examination, and a launcher's start, have bounds of time."""
    folder = new_folder(name)
    spec = {"nodes": 2, "ranks_per_node": 2, "settings": ["epochs=1"], "name": "it", **JOBS[name].spec}
    jobs.write_job(folder, JOBS[name].how, data, **spec)
    job = jobs.submit_rendered(cluster, folder)
    cluster.wait(job)
    one, run, hosts = JOBS[name], folder / "runs" / job, jobs.hosts(cluster.output(job))
    assert [hosts[rank] for rank in range(4)] == one.hosts
    records, summary = read_records(run), load_summary(run)
    assert (summary.ranks, summary.strategy, summary.stages) == (4, one.strategy, 2 if name == "stages" else 1)
    assert summary.workers == (4 - len(one.serving)) // summary.stages
    if name != "stages":
        serving = [rank for rank, found in records.items() if not any(record.samples for record in found)]
        assert sorted(hosts[rank] for rank in serving) == one.serving
    assert sum(record.bytes_sent + record.bytes_fetched for found in records.values() for record in found) > 0
    if one.spec.get("doctor"):
        assert "4 ranks on 2 nodes, 2 each (n1, n2)" in cluster.output(job), "the doctor came first"


def test_a_study_is_an_array_of_runs(cluster, workdir, data):
    cases = [["seed=1"], ["seed=2"]]
    spec = {"shape": "study", "ranks_per_node": 2, "job": TINY, "settings": ["epochs=1"], "cases": cases}
    jobs.write_job(workdir, "mpirun", data, name="it", **spec)
    job = jobs.submit(cluster, workdir)
    for task in range(2):
        cluster.wait(f"{job}_{task}")
    summaries = [load_summary(workdir / "runs" / f"{job}_{task}") for task in range(2)]
    assert [(summary.ranks, summary.seed) for summary in summaries] == [(2, 1), (2, 2)]
    (_, told, _), (_, first, _), (_, both, _) = jobs.slurm_in_turn(
        cluster, ["status"], ["logs", f"{job}_1"], ["logs"], cwd=workdir
    )
    assert f"{job}_1: COMPLETED" in told and "2 of 2 runs have ended" in told
    assert "allreduce on 2 ranks" in first and both.count("==> ") == 2
