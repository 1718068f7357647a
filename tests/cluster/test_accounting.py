"""What `hpcdist slurm` tells of jobs that Slurm's controller has forgotten: its accounting, a real one, remembers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import jobs

pytestmark = [pytest.mark.cluster, pytest.mark.extended]  # a cluster of its own, with a database
TINY = str(Path(__file__).parents[1] / "train" / "tiny.py")
SCRIPTS = {  # with sbatch's options
    "requeued": ('test -z "$SLURM_RESTART_COUNT" || exit 3; scontrol requeue $SLURM_JOB_ID; sleep 100',),
    "array": ("[ $SLURM_ARRAY_TASK_ID -lt 2 ] || sleep 100; exit $((2 * SLURM_ARRAY_TASK_ID))", "--array=0-4%1"),
    "half": ("[ $SLURM_ARRAY_TASK_ID = 1 ] || exit 3; until [ -e go ]; do sleep 0.1; done", "--array=0-1"),
    "cancelled": ("sleep 100", "-N2"),
    "never began": ("true", "--hold"),
    "completed": ("srun true", "-N2"),
    "failed": ("exit 7",),
    "killed": ("kill -9 $$",),
}
TOLD = """
import sys
from hpcdist.tools.slurm import queue, state
for job in sys.argv[1:]:
    print(*map(state.describe, queue.states(job)), sep="; ")
"""
TIME = r"00:\d\d:\d\d"


@pytest.fixture(scope="module")
def forgotten(accounted) -> dict[str, str]:
    """The ids of jobs of each of SCRIPTS and of a study, submitted in the cluster's folder.

    All have ended, but for a task of "half", and the controller has forgotten all that has.
    """
    folder = accounted.folder
    found = {
        name: accounted.submit(f"#!/bin/bash\n{script}\n", *options, cwd=folder)
        for name, (script, *options) in SCRIPTS.items()
    }
    jobs.write_digits(folder / "digits.h5")
    diverges = ["epochs=1", "optimizer=SGD", "optimizer.lr=1e30", "schedule=none", "clip_norm=none"]
    spec = {"shape": "study", "job": TINY, "cases": [["epochs=1"], diverges]}
    jobs.write_job(folder, "mpirun", folder / "digits.h5", name="it", **spec)
    found["study"] = jobs.submit(accounted, folder)
    for job in (found["cancelled"], f"{found['array']}_2"):
        accounted.wait(job, "RUNNING")
    accounted.run("scancel", found["cancelled"], found["array"], found["never began"])
    accounted.until(lambda: remembered(accounted) == ["RUNNING"], "all others are forgotten")
    ended = 6 + 4 + 1 + 2  # jobs, lines of the array, half of the other one, runs of the study
    accounted.until(lambda: recorded(accounted, *found.values()) == [False] * ended + [True], "all is recorded")
    return found


def remembered(cluster) -> list[str]:
    """The states of all jobs that the controller knows."""
    return re.findall(r"JobState=(\w+)", cluster.run("scontrol", "--oneliner", "show", "job").stdout)


def recorded(cluster, *job: str) -> list[bool]:
    """Which of these jobs and tasks are still to end, by the accounting, where a record arrives seconds late."""
    options = ("--allocations", "--noheader", "--parsable2", "--format=State")
    told = cluster.run("sacct", *options, "--jobs", ",".join(job)).stdout.splitlines()
    return sorted(state in ("PENDING", "RUNNING", "REQUEUED") for state in told)


@pytest.fixture
def status(accounted) -> Callable[[str], str]:
    return lambda job: jobs.slurm(accounted, "status", job, cwd=accounted.folder).stdout


def test_what_became_of_jobs(accounted, forgotten):
    expected = {
        "completed": rf"COMPLETED on n\[[\d,-]+\] after {TIME}",
        "failed": rf"FAILED on n\d after {TIME} with status 7",
        "killed": rf"FAILED on n\d after {TIME} with status 137",
        "cancelled": rf"CANCELLED on n\[[\d,-]+\] after {TIME} with status 1",
        "never began": "CANCELLED after 00:00:00 with status 1",
        "requeued": rf"FAILED on n\d after {TIME} with status 3 \(requeued once\)",
    }
    told = accounted.run("python", "-c", TOLD, *(forgotten[name] for name in expected)).stdout.splitlines()
    for (name, text), line in zip(expected.items(), told, strict=True):
        assert re.fullmatch(f"job {forgotten[name]} is {text}", line)


def test_what_became_of_an_array_s_tasks(forgotten, status):
    job = forgotten["array"]
    never = rf"{job}_\[[23]-4%1\]: CANCELLED after 00:00:00 with status 1\n"
    assert re.fullmatch(
        rf"{job}_0: COMPLETED on n\d after {TIME}\n"
        rf"{job}_1: FAILED on n\d after {TIME} with status 2\n"
        rf"{job}_2: CANCELLED on n\d after {TIME} with status 1\n{never}",
        "".join(sorted(status(job).splitlines(keepends=True))),
    )
    assert re.fullmatch(rf"{job}_1: FAILED .* with status 2\n", status(f"{job}_1"))
    assert re.fullmatch(never, status(f"{job}_4"))


def test_what_became_of_a_study(accounted, forgotten, status):
    job = forgotten["study"]
    told = status(job)
    assert re.search(rf"^{job}_0: COMPLETED on n\d after {TIME}$", told, re.M)
    assert re.search(rf"^{job}_1: FAILED on n\d after {TIME} with status [1-9]\d*$", told, re.M)
    assert "1 of 2 runs have ended" in told
    logs = jobs.slurm(accounted, "logs", "--follow", cwd=accounted.folder).stdout
    assert f"==> runs/it-{job}_1.out <==" in logs and "must be finite" in logs


def test_a_task_is_forgotten_before_its_array_has_ended(forgotten, status):
    job = forgotten["half"]
    failed = rf"{job}_0: FAILED on n\d after {TIME} with status 3\n"
    assert re.fullmatch(rf"{job}_1: RUNNING on n\d for .*\n{failed}", status(job))
    assert re.fullmatch(failed, status(f"{job}_0"))
