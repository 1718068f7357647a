"""`hpcdist doctor` on a real Slurm: a slow node, one that does not answer, a PMI that MPI does not speak."""

from __future__ import annotations

import contextlib
import json
from functools import partial

import pytest

from cluster import jobs, kit

PMI2 = kit.mpich()  # srun --mpi=pmi2 starts it whenever it is asked to


@pytest.mark.parametrize(("mpi", "env"), [("pmi2", {}), ("none", PMI2)], ids=["openmpi-pmi2", "mpich-none"])
def test_a_pmi_that_gives_worlds_of_size_1_is_told_once(cluster, workdir, mpi, env):
    command = f"srun -N2 --ntasks-per-node=1 --mpi={mpi} hpcdist doctor --ranks 2 --exclude-file out"
    done = cluster.run(*command.split(), cwd=workdir, env=env, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    found = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert [row[:2] for row in found] == [["error", "world"], ["error", "all"]]
    assert "the number of ranks in MPI's world must be the launcher's, 2 (" in found[0][2]
    assert "; got 1 with " in found[0][2]
    assert "`srun --mpi=pmix` for Open MPI, `srun --mpi=pmi2` for MPICH" in found[0][2]
    assert (workdir / "out").read_text() == ""


def test_a_job_with_a_node_to_spare_goes_on_without_the_one_behind_a_slow_cable(cluster, workdir):
    """Through the template."""
    spec = {"shape": "cpu", "nodes": 3, "spare_nodes": 1, "ranks_per_node": 1, "doctor": True, "command": ["hostname"]}
    jobs.write_job(workdir, "srun-pmi2", workdir, name="it", **spec)
    with cluster.shaped("n3", mbit_s=50):
        job = jobs.submit(cluster, workdir)
        cluster.wait(job)
    said = cluster.output(job)
    text = [line.partition(": ")[2] for line in said.splitlines()]  # each begins with the rank
    found = [line.split(maxsplit=2) for line in text]
    assert ["warning", "links"] in [row[:2] for row in found if row[2:] and row[2].startswith("n3 is slow: ")], said
    assert ["ok", "spare", "excludes n3; 3 remain: n1, n2, n4"] in found
    assert "4 ranks on 4 nodes, 1 each (n1, n2, n3, n4), MPICH" in said and "started by srun --mpi=pmi2" in said
    assert "seen by all nodes within" in said
    assert sorted(line for line in text if line in cluster.nodes) == ["n1", "n2", "n4"], "those that went on"


SILENT = """
import os, time
from mpi4py import MPI
from hpcdist.tools import cli
from hpcdist.comm.mpi import first_messages
MPI.COMM_WORLD.Barrier()
first_messages.ANSWER_S = 2.0
if os.environ["SLURMD_NODENAME"] == "n2":
    time.sleep(100)
cli.main()
"""


def test_a_node_that_does_not_answer_is_named_and_left_out(cluster, workdir):
    (workdir / "silent.py").write_text(SILENT)
    options = "doctor --spare 1 --exclude-file out --json told.json"
    command = f"-w n1,n2,n3 -N3 --ntasks-per-node=1 --mpi=pmi2 python silent.py {options}"
    cluster.run("sh", "-c", f"srun {command}; echo $? > status", cwd=workdir, env=PMI2)
    told = json.loads((workdir / "told.json").read_text())
    (found,) = [f for f in told["findings"] if f["status"] == "error"]
    assert found["nodes"] == ["n2"]
    assert "nothing from rank 1 within 2 s, nor from any rank on n2. It has ended, is stopped, or" in found["text"]
    assert (told["status"], told["excluded"]) == (1, ["n2"]) and (workdir / "out").read_text() == "n2\n"
    assert (workdir / "status").read_text() != "0\n"


# --- the job goes on without a node -----------------------------------------------------------------------------------
HANG = 'if [ "$(uname -n)" = n2 ]; then kill -STOP $$; fi; exec "$@"'


def job(cluster, workdir, how, *, site=None, **spec):
    """A job of which three nodes are wanted, with the doctor before it; its log, its warnings' and errors' texts, and
    the nodes that it has run on.
    """
    spec = {"shape": "cpu", "nodes": 3, "ranks_per_node": 1, "doctor": True, "command": ["hostname"], **spec}
    jobs.write_job(workdir, how, workdir, name="it", **spec)
    (workdir / "site.toml").write_text(jobs.toml({**jobs.EVERYWHERE, **jobs.SITES[how], **(site or {})}))
    number = jobs.submit_rendered(cluster, workdir)
    cluster.wait(number)
    said = cluster.output(number)
    rows = [line.partition(": ")[2].split(maxsplit=2) for line in said.splitlines()]  # each begins with the rank
    found = [row[2] for row in rows if len(row) == 3 and row[0] in ("warning", "error")]
    return said, found, sorted(jobs.hosts(said).values())


@contextlib.contextmanager
def disconnected(cluster, one, other):
    """Within the block what two nodes send each other gets lost."""
    with contextlib.ExitStack() as stack:
        for host, to in ((one, other), (other, one)):
            ip, address = partial(cluster.run, "ip", on=host), cluster.hosts.addresses[to]
            ip("neigh", "replace", address, "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
            stack.callback(ip, "neigh", "del", address, "dev", "eth0")
        yield


def test_a_job_goes_on_without_one_of_two_nodes_that_pass_each_other_nothing(cluster, workdir):
    """Open MPI does not start there: it waits."""
    with disconnected(cluster, "n2", "n3"):
        said, found, ran = job(cluster, workdir, "srun-pmix", nodes=2, spare_nodes=1)
    told = "the link n2-n3 passes nothing: no TCP connection within 3.5 s, though all reach n1. Exclude one"
    assert found[0].startswith(told), said
    assert ran == ["n1", "n2"], said


@pytest.mark.extended
def test_a_job_goes_on_without_a_node_that_hangs(cluster, workdir):
    (workdir / "hang.sh").write_text(HANG)
    said, found, ran = job(cluster, workdir, "srun-pmi2", spare_nodes=1, site={"container": ["bash", "hang.sh"]})
    assert found[0] == "n2 must connect to n1 by TCP; it did not within 8 s: it hangs, or can't reach it", said
    assert ran == ["n1", "n3", "n4"], said
