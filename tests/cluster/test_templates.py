"""The template of each shape, through Slurm, on nodes that share nothing but files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster import jobs
from hpcdist.records import load_summary, read_records

HERE = Path(__file__).parent
TINY = str(HERE.parent / "train" / "tiny.py")
TRANSFORMER = str(HERE.parents[1] / "jobs" / "transformer.py")


def run(cluster, workdir, how, data, **spec):
    """Submits a job and waits for its end; its log and the folder of its run."""
    jobs.write_job(workdir, how, data, name="it", **spec)
    job = jobs.submit(cluster, workdir)
    cluster.wait(job)
    return cluster.output(job), workdir / "runs" / job


@pytest.mark.parametrize(
    ("how", "nodes", "ranks_per_node", "spec"),
    [
        ("srun-pmix", 2, 2, {"shape": "cpu", "doctor": True}),
        pytest.param("mpiexec", 4, 2, {"shape": "cpu"}, marks=pytest.mark.extended),
        ("mpirun", 2, 1, {"shape": "allreduce"}),  # GPUs are asked for and dealt out; there is none to compute on
        ("srun-pmi2", 3, 1, {"shape": "gossip"}),
    ],
)
def test_every_rank_trains_on_its_node(cluster, workdir, data, how, nodes, ranks_per_node, spec):
    size = nodes * ranks_per_node
    spec |= {"nodes": nodes, "ranks_per_node": ranks_per_node, "job": TINY, "settings": ["epochs=1"]}
    log, folder = run(cluster, workdir, how, data, **spec)
    assert jobs.hosts(log) == {rank: f"n{rank // ranks_per_node + 1}" for rank in range(size)}
    summary = load_summary(folder)
    assert (summary.ranks, summary.workers) == (size, size)
    assert summary.strategy == ("gossip_pull" if spec["shape"] == "gossip" else "allreduce")
    assert sum(record.bytes_sent + record.bytes_fetched for record in read_records(folder)[0]) > 0


@pytest.mark.parametrize(
    ("servers_on", "how", "nodes", "ranks_per_node", "servers", "there"),
    [
        ("first_node", "mpirun", 2, 2, 1, {"n1"}),
        ("one_per_node", "srun-pmix", 2, 2, 2, {"n1", "n2"}),
    ],
)
def test_servers_run_where_the_job_says(cluster, workdir, data, servers_on, how, nodes, ranks_per_node, servers, there):
    spec = {"nodes": nodes, "ranks_per_node": ranks_per_node, "servers": servers, "servers_on": servers_on}
    log, folder = run(cluster, workdir, how, data, shape="parameter_server", job=TINY, settings=["epochs=1"], **spec)
    hosts, records = jobs.hosts(log), read_records(folder)
    serving = {rank for rank, found in records.items() if not any(record.samples for record in found)}
    assert len(serving) == servers and len(hosts) == nodes * ranks_per_node
    assert {hosts[rank] for rank in serving} == there
    assert sorted(hosts.values()) == sorted(f"n{i // ranks_per_node + 1}" for i in range(nodes * ranks_per_node))


@pytest.mark.extended
def test_stages_inside_a_node_and_data_parallel_across(cluster, workdir, data):
    spec = {"shape": "hybrid", "nodes": 2, "ranks_per_node": 2, "command": ["python", str(HERE / "hybrid.py")]}
    _, folder = run(cluster, workdir, "srun-pmi2", data, gpus_per_rank=0, **spec)
    told = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert [(one["host"], one["stage"]) for one in told] == [("n1", 0), ("n1", 1), ("n2", 0), ("n2", 1)]
    assert told[0]["weight"] == told[2]["weight"] != told[1]["weight"] == told[3]["weight"]
    for losses in (told[1]["losses"], told[3]["losses"]):
        assert losses[-1] < losses[0]


def test_a_job_in_stages_inside_a_node(cluster, workdir, data):
    data_path = f"data.path={json.dumps(str(workdir / 'reference.h5'))}"
    settings = [data_path, "model.width=16", "model.blocks=2", "budget.steps=5"]
    spec = {"shape": "hybrid", "nodes": 2, "ranks_per_node": 2, "gpus_per_rank": 0, "strategy": "gossip_pull"}
    log, folder = run(cluster, workdir, "mpiexec", data, job=TRANSFORMER, settings=settings, **spec)
    assert jobs.hosts(log) == {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
    summary = load_summary(folder)
    assert (summary.ranks, summary.workers, summary.stages) == (4, 2, 2) and summary.strategy == "gossip_pull"


def test_a_study_is_an_array_of_runs(cluster, workdir, data):
    cases = [["seed=1"], ["seed=2"]]
    spec = {"shape": "study", "ranks_per_node": 2, "job": TINY, "settings": ["epochs=1"], "cases": cases}
    jobs.write_job(workdir, "mpirun", data, name="it", **spec)
    job = jobs.submit(cluster, workdir)
    for task in range(2):
        cluster.wait(f"{job}_{task}")
    summaries = [load_summary(workdir / "runs" / f"{job}_{task}") for task in range(2)]
    assert [(summary.ranks, summary.seed) for summary in summaries] == [(2, 1), (2, 2)]
    told = jobs.slurm(cluster, "status", cwd=workdir).stdout
    assert f"{job}_1: COMPLETED" in told and "2 of 2 runs have ended" in told
    assert "allreduce on 2 ranks" in jobs.slurm(cluster, "logs", f"{job}_1", cwd=workdir).stdout
    assert jobs.slurm(cluster, "logs", cwd=workdir).stdout.count("==> ") == 2
