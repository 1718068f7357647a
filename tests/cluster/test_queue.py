"""`hpcdist slurm submit|status|logs|cancel|requeue` and Slurm: what it answers, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from cluster import jobs
from hpcdist.tools.slurm import history

SLOW = str(Path(__file__).with_name("slow.py"))


@pytest.fixture
def prepared(cluster, workdir, data):
    """`prepared(*command, **spec)` writes the settings of a job of one task that runs a command."""

    def write(*command: str, **spec) -> None:
        jobs.write_job(workdir, "mpirun", data, **{"name": "it", "command": list(command), **spec})

    return write


@pytest.fixture
def slurm(cluster, workdir):
    """`slurm(*arguments)` is the finished `hpcdist slurm ...` in `workdir`, whatever its exit status."""
    return lambda *arguments: jobs.slurm(cluster, *arguments, cwd=workdir, check=False)


def test_what_is_submitted_is_remembered(cluster, workdir, prepared, slurm):
    for command in ("init -q .", "-c user.name=a -c user.email=a@b commit -qm first --allow-empty"):
        subprocess.run(["git", *command.split()], cwd=workdir, check=True)
    prepared("sh", "-c", 'echo "told on $(hostname)"; echo more >&2')
    done = slurm("submit", "job.toml", "--wait")
    job = done.stdout.strip()
    assert done.returncode == 0 and job.isdigit(), done.stderr
    assert f"its run goes to runs/{job}, its log to runs/it-{job}.out" in done.stderr
    assert f"job {job} is COMPLETED" in done.stderr
    entry = history.find(None, workdir / ".hpcdist")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=workdir, capture_output=True, text=True).stdout.strip()
    assert (entry.job, entry.name, entry.commit, entry.dirty) == (job, "it", head, False)
    assert entry.spec["command"][0] == "sh" and entry.script == f".hpcdist/{job}.sh"
    assert (workdir / entry.script).read_text() == slurm("render", "job.toml").stdout
    assert "told on n1" in slurm("logs").stdout
    told = slurm("status").stdout
    assert re.search(rf"^{job}: COMPLETED on n1 after 00:00:\d\d$", told, re.M)
    assert re.search(rf"^commit: {head[:12]}$", told, re.M) and f"log: runs/it-{job}.out" in told


def test_waiting_has_the_job_s_exit_status(workdir, prepared, slurm):
    prepared("sh", "-c", "exit 7")
    done = slurm("submit", "job.toml", "--wait")
    assert done.returncode == 7 and "is FAILED" in done.stderr and "with status 7" in done.stderr


def test_progress_comes_from_the_records_of_the_run(workdir, prepared, slurm):
    prepared(command=[], job=SLOW, settings=["epochs=3"])
    done = slurm("submit", "job.toml", "--wait")
    assert done.returncode == 0, done.stderr
    assert re.search(r"100% .* step 69, 1077 samples, loss \d\.\d{4}", done.stderr), done.stderr
    assert re.search(r"run: runs/\d+: step 69, 1077 samples, loss \d\.\d+, has ended", slurm("status").stdout)


def test_a_log_is_followed_to_the_job_s_end(cluster, workdir, prepared, slurm):
    prepared("sh", "-c", "echo first; sleep 2; echo last")
    job = slurm("submit", "job.toml").stdout.strip()
    done = slurm("logs", "--follow")
    assert done.returncode == 0 and re.search("first.*last", done.stdout, re.S)
    assert cluster.job(job)["JobState"] == "COMPLETED"


def test_a_job_is_cancelled_and_put_back(cluster, workdir, prepared, slurm):
    prepared("sleep", "100")
    job = slurm("submit", "job.toml").stdout.strip()
    cluster.wait(job, "RUNNING")
    assert re.search(rf"^{job}: RUNNING on n1 for .* of 00:10:00$", slurm("status").stdout, re.M)
    assert slurm("requeue").returncode == 0
    cluster.until(lambda: cluster.job(job)["JobState"] == "PENDING", "it waits again")
    told = slurm("status", job).stdout
    assert re.search(r"PENDING \(BeginTime\)|RUNNING on n1", told) and "(requeued once)" in told, "it waits for seconds"
    assert slurm("cancel").returncode == 0
    cluster.wait(job, "CANCELLED")
    assert slurm("cancel").returncode == 0, "there is nothing left to do"


@pytest.mark.parametrize("command", ["status", "logs", "cancel", "requeue"])
def test_a_job_that_nobody_knows_is_refused(cluster, workdir, slurm, command):
    done = slurm(command, "4711")
    assert done.returncode == 1
    assert "job must be one that Slurm or .hpcdist/jobs.jsonl knows; got 4711" in done.stderr or re.search(
        "Slurm must accept `s.*4711`; got: .*Invalid job id", done.stderr
    )


def test_a_job_that_slurm_has_forgotten_is_known_by_its_files(cluster, workdir, slurm, prepared):
    prepared("true")
    slurm("submit", "job.toml", "--wait")
    path = workdir / ".hpcdist" / "jobs.jsonl"
    entry = json.loads(path.read_text())
    path.write_text(json.dumps({**entry, "job": "4711"}) + "\n")
    assert "4711: unknown" in slurm("status").stdout


def test_a_log_that_is_not_there_yet(cluster, workdir, slurm, prepared):
    prepared("true")
    job = slurm("submit", "job.toml", "--set", "directives.add.hold=true").stdout.strip()
    done = slurm("logs")
    assert done.returncode == 1
    assert f"job {job} must have begun to have a log; got none yet: job {job} is PENDING" in done.stderr
    cluster.run("scancel", job)


def test_what_slurm_refuses_is_told_in_its_words(cluster, workdir, slurm, prepared):
    prepared("true", nodes=5)
    done = slurm("submit", "job.toml")
    assert done.returncode == 1 and "Requested node configuration is not available" in done.stderr
    assert history.read(workdir / ".hpcdist") == [] and not list(workdir.glob(".hpcdist/*.sh"))
