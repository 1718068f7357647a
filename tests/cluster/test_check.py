"""What a real Slurm makes of rendered scripts: hostile text arrives as it is, and a job that can't run is refused."""

from __future__ import annotations

import json
import re

from cluster import jobs
from hpcdist.tools.slurm.render import render
from hpcdist.tools.slurm.spec import JobSpec, Site

HOSTILE = """it's "quoted" $(touch owned) `touch owned` ; | & # #SBATCH --hold %j {{ 7 }} é -"""
WITH_BACKSLASH = HOSTILE + r" \n \" \\"


def test_names_and_words_arrive_as_they_are(cluster, workdir):
    code = "import json, os, sys; json.dump(sys.argv[1:], open(os.environ['HPCDIST_RUN'] + '/told', 'w'))"
    words = [WITH_BACKSLASH, "a\n#SBATCH --hold\nb", "-x", ""]
    spec = JobSpec(
        name=HOSTILE.replace("%j", "%"), output=f"out {HOSTILE}", command=["python", "-c", code, *words], doctor=False
    )
    (workdir / spec.output).mkdir()
    text = render(spec, Site(cpu_bind="none", directives={"add": {"comment": WITH_BACKSLASH}})).text
    job = cluster.submit(text, "--hold", cwd=workdir)
    told = cluster.run("scontrol", "show", "job", job).stdout
    assert f"JobName={spec.name}\n" in told and f"Comment={WITH_BACKSLASH}" in told
    cluster.run("scontrol", "release", job)
    log = workdir / spec.output / f"{spec.name}-{job}.out"
    cluster.until(log.exists, "the log is where it was asked for")
    cluster.wait(job)
    assert json.loads((workdir / spec.output / job / "told").read_text()) == words
    assert "0: n1 Cpus_allowed_list:" in log.read_text() and not (workdir / "owned").exists()


CHECKED = {  # a setting, and the beginnings of the errors that are found
    "name=it": [],
    "cpus_per_rank=9": ["ranks_per_node x cpus_per_rank must be at most the 8 cores", "sbatch --test-only"],
    "nodes=5": [
        "nodes + spare_nodes must be at most the number of fitting nodes of main, 4", "sbatch --test-only",
    ],
    "gpus_per_rank=3": ["ranks_per_node x gpus_per_rank must be at most the 2 GPUs", "sbatch --test-only"],
    "directives.add.partition=x": ["partition must be one of main, urgent; got 'x'.", "sbatch --test-only"],
    "directives.add.constraint=x": ["sbatch --test-only"],
    "site=./pmix.toml": ["mpi must be one of "],
}  # fmt: skip


def test_what_the_cluster_cannot_do_is_found_before_the_queue(cluster, workdir, data):
    jobs.write_job(workdir, "srun-pmi2", data, nodes=2, command=["true"])
    site = (workdir / "site.toml").read_text()
    (workdir / "pmix.toml").write_text(site.replace('"pmi2"', '"pmix_v99"'))
    commands = [["check", "job.toml", f"--set={setting}"] for setting in CHECKED]
    found = jobs.slurm_in_turn(cluster, *commands, cwd=workdir)
    for (setting, expected), (status, told, _) in zip(CHECKED.items(), found, strict=True):
        errors = [line.removeprefix("error: ") for line in told.splitlines() if line.startswith("error: ")]
        assert len(errors) == len(expected) and status == bool(expected), (setting, told)
        assert all(error.startswith(text) or text in error for text, error in zip(expected, errors)), (setting, told)
    assert "'pmix_v99'" in told


def test_an_interactive_job_runs_where_it_is_called(cluster, workdir):
    """salloc's command runs on the host that called it, and its steps on the nodes that it was given."""
    code = "import os; print(f'on {os.uname().nodename}, first {os.environ[\"MASTER_ADDR\"]}')"
    spec = JobSpec(shape="interactive", nodes=2, ranks_per_node=2, command=["python", "-c", code], doctor=False)
    (workdir / "it.sh").write_text(render(spec, Site(cpu_bind="none")).text)
    told = cluster.run("bash", "it.sh", cwd=workdir).stdout
    hosts = {int(rank): host for rank, host in re.findall(r"^(\d): on (n\d), first n1", told, re.M)}
    assert hosts == {0: "n1", 1: "n1", 2: "n2", 3: "n2"}, told
