"""`hpcdist slurm submit|status|logs|cancel|requeue` and Slurm: what it answers, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest

from cluster import jobs
from hpcdist.tools.slurm import history

SLOW = str(Path(__file__).with_name("slow.py"))


@pytest.fixture
def prepared(cluster, workdir, data):
    """`prepared(*command, **spec)` writes the settings of a job of one task that runs a command."""

    def write(*command: str, **spec) -> None:
        given = {"command": list(command)} if command else {}
        jobs.write_job(workdir, "mpirun", data, **{"name": "it", **given, **spec})

    return write


@pytest.fixture
def slurm(cluster, workdir):
    """`slurm(*arguments)` is the finished `hpcdist slurm ...` in `workdir`, whatever its exit status."""
    return lambda *arguments: jobs.slurm(cluster, *arguments, cwd=workdir, check=False)


@pytest.fixture
def in_turn(cluster, workdir):
    """`in_turn(*commands)`: the status, output and errors of each `hpcdist slurm ...`."""
    return partial(jobs.slurm_in_turn, cluster, cwd=workdir)


def test_a_run_is_remembered_and_its_progress_comes_from_its_records(workdir, prepared, slurm, in_turn):
    for command in ("init -q .", "-c user.name=a -c user.email=a@b commit -qm first --allow-empty"):
        subprocess.run(["git", *command.split()], cwd=workdir, check=True)
    prepared(job=SLOW, settings=["epochs=3"])
    done = slurm("submit", "job.toml", "--wait")
    job = done.stdout.strip()
    assert done.returncode == 0 and job.isdigit(), done.stderr
    assert f"its run goes to runs/{job}, its log to runs/it-{job}.out" in done.stderr
    assert f"job {job} is COMPLETED" in done.stderr
    assert re.search(r"100% .* step 69, 1077 samples, loss \d\.\d{4}", done.stderr), done.stderr
    entry = history.find(None, workdir / ".hpcdist")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=workdir, capture_output=True, text=True).stdout.strip()
    assert (entry.job, entry.name, entry.commit, entry.dirty) == (job, "it", head, False)
    assert entry.spec["job"] == SLOW and entry.script == f".hpcdist/{job}.sh"
    (_, script, _), (_, log, _), (_, told, _) = in_turn(["render", "job.toml"], ["logs"], ["status"])
    assert (workdir / entry.script).read_text() == script and "n1 Cpus_allowed_list" in log
    assert re.search(rf"^{job}: COMPLETED on n1 after 00:00:\d\d$", told, re.M)
    assert re.search(rf"^commit: {head[:12]}$", told, re.M) and f"log: runs/it-{job}.out" in told
    assert re.search(r"run: runs/\d+: step 69, 1077 samples, loss \d\.\d+, has ended", told)


def test_waiting_has_the_job_s_exit_status_and_a_job_that_slurm_has_forgotten_is_known_by_its_files(
    workdir, prepared, slurm
):
    prepared("sh", "-c", "exit 7")
    done = slurm("submit", "job.toml", "--wait")
    assert done.returncode == 7 and "is FAILED" in done.stderr and "with status 7" in done.stderr
    path = workdir / ".hpcdist" / "jobs.jsonl"
    path.write_text(json.dumps({**json.loads(path.read_text()), "job": "4711"}) + "\n")
    assert "4711: unknown" in slurm("status").stdout


def test_a_log_is_followed_to_the_job_s_end(cluster, workdir, prepared, slurm):
    prepared("sh", "-c", "echo first; sleep 2; echo last")
    job = jobs.submit(cluster, workdir)
    done = slurm("logs", "--follow")
    assert done.returncode == 0 and re.search("first.*last", done.stdout, re.S)
    assert cluster.job(job)["JobState"] == "COMPLETED"


def test_a_job_is_held_begun_put_back_and_cancelled(cluster, workdir, prepared, in_turn):
    prepared("sleep", "100")
    job = jobs.submit(cluster, workdir, "--set", "directives.add.hold=true")
    ((status, _, said),) = in_turn(["logs"])
    assert status == 1 and f"job {job} must have started to have a log; got none yet: job {job} is PENDING" in said
    cluster.run("scontrol", "release", job)
    cluster.wait(job, "RUNNING")
    (_, told, _), (status, _, _) = in_turn(["status"], ["requeue"])
    assert re.search(rf"^{job}: RUNNING on n1 for .* of 00:10:00$", told, re.M) and status == 0
    cluster.until(lambda: cluster.job(job)["JobState"] == "PENDING", "it waits again")
    (_, told, _), (first, _, _), (again, _, _) = in_turn(["status", job], ["cancel"], ["cancel"])
    assert re.search(r"PENDING \(BeginTime\)|RUNNING on n1", told) and "(requeued once)" in told, "it waits for seconds"
    assert (first, again) == (0, 0), "there is nothing left to do the second time"
    cluster.wait(job, "CANCELLED")


def test_a_job_that_nobody_knows_is_refused(in_turn):
    commands = [[command, "4711"] for command in ("status", "logs", "cancel", "requeue")]
    for (command, _), (status, _, said) in zip(commands, in_turn(*commands), strict=True):
        assert status == 1, command
        assert "job must be one that Slurm or .hpcdist/jobs.jsonl knows; got 4711" in said or re.search(
            "Slurm must accept `s.*4711`; got: .*Invalid job id", said
        ), (command, said)


def test_what_slurm_refuses_is_told_in_its_words(workdir, slurm, prepared):
    prepared("true", nodes=5)
    done = slurm("submit", "job.toml")
    assert done.returncode == 1 and "Requested node configuration is not available" in done.stderr
    assert history.read(workdir / ".hpcdist") == [] and not list(workdir.glob(".hpcdist/*.sh"))
