"""What ends a job before its run is done: a warning, its time limit, a job that matters more, a node that dies.

Each time it is requeued, and its run ends with the parameters of one that was left in peace. All of them run at the
same time, for most of it is waiting: for Slurm to notice a dead node, and for credentials to expire.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster import jobs
from hpcdist.records import load_summary, read_records

SLOW = str(Path(__file__).with_name("slow.py"))
STEPS = 144  # 12 epochs of 12 on two ranks, 0.04 s each
SETTINGS = ["epochs=12", "checkpoint.every_steps=10", "leave.every_s=0.3"]
JOBS = {  # the hosts of its two ranks
    "bereft": (),  # n1 and n2, being the first; later others
    "bereft_mpirun": (),  # the same
    "warned": ("n1", "n4"),
    "preempted": ("n3",),
    "limited": ("n4",),
    "in_peace": ("n4",),
}
OUTLIVES = {  # a rank dies, and the others go on; they meet once an epoch only
    "shape": "gossip", "shrink": True, "nodes": 3, "ranks_per_node": 1, "env": {"DIES": "2"},
    "settings": ["epochs=3", "batch_size=4", "leave.enabled=false", "checkpoint.every_s=0"],
}  # fmt: skip


@pytest.fixture(scope="module")
def submitted(cluster, new_folder, data):
    """The jobs by their names, each with its number, the folder that it was submitted from, and that of its run."""
    found = {}
    for name, hosts in {"outlived": ("n1", "n3", "n4"), **JOBS}.items():
        folder, nodes = new_folder(name), len(hosts) or 2
        spec = {"nodes": nodes, "ranks_per_node": 2 // nodes, "job": SLOW, "settings": list(SETTINGS), "name": name}
        spec |= OUTLIVES if name == "outlived" else {}
        if name == "limited":  # to one minute, of which it leaves 54 s
            spec |= {"time_min": 1, "warn_s": 1}
            spec["settings"].append("leave.margin_s=54")
        how = "mpirun" if name in ("warned", "bereft_mpirun", "outlived") else "srun-pmix"
        jobs.write_job(folder, how, data, **spec)
        where = [f"directives.add.nodelist={','.join(hosts)}"] if hosts else []
        job = jobs.submit_rendered(cluster, folder, *where)
        found[name] = SimpleNamespace(job=job, folder=folder, run=folder / "runs" / job)
    return found


@pytest.fixture(scope="module")
def befallen(cluster, submitted):
    """The same; to each something happens when it has saved a checkpoint."""

    def preempt():
        one, options = submitted["preempted"], ("--partition=urgent", "--nodelist=n3", "--exclusive")
        one.urgent = cluster.submit("#!/bin/bash\nsleep 1\n", *options, cwd=one.folder)

    def extend():  # what was begun keeps to the limit that it has read
        cluster.run("scontrol", "update", f"JobId={submitted['limited'].job}", "TimeLimit=10")

    events = {
        "warned": lambda: cluster.run("scancel", "--batch", "--signal=USR1", submitted["warned"].job),
        "preempted": preempt,
        "limited": extend,
        "bereft bereft_mpirun": lambda: cluster.kill("n2"),
    }

    def may_come(name: str) -> bool:
        # What takes n3 from one job would take it from the other, which was submitted before, and is shorter.
        alone = name != "preempted" or cluster.job(submitted["outlived"].job)["JobState"] == "COMPLETED"
        return alone and bool(list(submitted[name].run.glob("checkpoints/step-????????")))

    def all_done() -> bool:
        for names in list(events):
            if all(map(may_come, names.split())):
                events.pop(names)()
        return not events

    cluster.until(all_done, "a checkpoint of each job")
    yield submitted
    cluster.start("n2")


@pytest.fixture(scope="module")
def reference(cluster, submitted):
    """The sha256 of the parameters at the end of the run that nothing happened to."""
    one = submitted["in_peace"]
    assert cluster.wait(one.job)["Restarts"] == "0"
    return load_summary(one.run).sha256


@pytest.fixture
def ended(cluster, befallen, reference):
    """`ended(name)` waits for a job's end; what Slurm tells of it, and its log.

    It was started twice, has made each step, and ended where the job that was left in peace did.
    """

    def wait(name: str) -> tuple[dict[str, str], str]:
        one = befallen[name]
        told = cluster.wait(one.job)
        assert told["Restarts"] == "1", cluster.output(one.job)
        for records in read_records(one.run).values():
            assert [record.step for record in records] == list(range(1, STEPS + 1))
        assert load_summary(one.run).sha256 == reference
        return told, cluster.output(one.job)

    return wait


def left(log: str) -> tuple[int, str, int]:
    """After which step a run left, why, and from which step it went on."""
    after, why = re.search(r"left after step (\d+) \((.*?)\), saved in", log).groups()
    return int(after), why, int(re.search(r"resuming from \S*step-(\d+)", log)[1])


def test_a_warning_to_the_batch_shell_reaches_all_ranks(ended):
    told, log = ended("warned")
    after, why, again = left(log)
    assert told["NodeList"] == "n[1,4]" and again == after < STEPS and why.startswith("SIGUSR1 on rank ")


def test_a_job_that_matters_more_takes_the_node_and_gives_it_back(cluster, ended, befallen):
    _, log = ended("preempted")
    after, why, again = left(log)
    assert again == after < STEPS and why.startswith("SIGTERM on rank ")
    assert cluster.job(befallen["preempted"].urgent)["JobState"] == "COMPLETED"


def test_a_run_leaves_before_its_time_limit(ended):
    after, why, again = left(ended("limited")[1])
    assert again == after < STEPS and re.fullmatch(r"the time limit, \d+ s ahead", why)


@pytest.mark.parametrize("name", ["bereft", "bereft_mpirun"])
def test_a_job_goes_on_without_the_node_that_died(ended, name):
    told, log = ended(name)
    assert "left after" not in log, "there was no time to"
    again = int(re.search(r"resuming from \S*step-(\d+)", log)[1])
    assert 0 < again < STEPS and again % 10 == 0
    assert "2" not in told["NodeList"], "it had no other choice"


def test_a_run_goes_on_without_a_rank_that_died(cluster, submitted):
    one = submitted["outlived"]
    told = cluster.wait(one.job)
    assert (load_summary(one.run).lost_ranks, told["Restarts"]) == ([2], "0")
    records = read_records(one.run)
    assert len(records[2]) < 33 < len(records[0])
