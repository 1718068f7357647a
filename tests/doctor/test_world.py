"""Whether the world is the one that was started, and how ranks lie on nodes and cores."""

from __future__ import annotations

import pytest

from hpcdist.comm.launch import Task
from hpcdist.errors import WorldError
from hpcdist.tools.doctor.base import ERROR, OK, WARNING, Nodes, Requirements, find_nodes
from hpcdist.tools.doctor.checks import world

LIBRARY = "Open MPI v5.0.11"
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def disagreement(size: int, environ: dict, ranks: int | None = None) -> str | None:
    return world.disagreement(size, LIBRARY, Requirements(ranks=ranks, environ=environ))


# --- one world of the right size --------------------------------------------------------------------------------------
@pytest.mark.parametrize(("size", "asked", "environ"), [(4, None, SRUN), (4, 4, SRUN), (1, None, {}), (3, 3, {})])
def test_a_world_of_the_size_that_was_started_is_one(size, asked, environ):
    assert disagreement(size, environ, asked) is None


def test_worlds_of_one_are_explained():
    text = disagreement(1, SRUN)
    assert "MPI's world must be the launcher's, 4 (srun); got 1 with Open MPI v5.0.11" in text
    assert "`srun --mpi=pmix` for Open MPI, `srun --mpi=pmi2` for MPICH" in text


def test_another_size_than_the_one_asked_for():
    assert disagreement(4, SRUN, ranks=8).startswith("MPI's world must have 8 ranks (--ranks); got 4 with Open MPI")
    assert disagreement(1, {}, ranks=2).endswith("put srun or mpirun before the command")


def test_a_batch_script_that_forgot_the_launcher():
    text = disagreement(1, {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"})
    assert text.startswith("MPI's world must have 8 ranks (SLURM_NTASKS); got 1 with Open MPI v5.0.11. No launcher has")
    assert disagreement(4, {"SLURM_NTASKS": "2", "OMPI_COMM_WORLD_SIZE": "4"}) is None, "of mpirun's daemons"


# --- nodes and cores --------------------------------------------------------------------------------------------------
def judge(nodes: Nodes, cores: list, threads: int = 1, tasks: list | None = None):
    ranks = [{"cores": own, "threads": threads, "task": None} for own in cores]
    for row, told in zip(ranks, tasks or []):
        row["task"] = told
    return list(world.judge({"ranks": ranks, "library": LIBRARY}, nodes, Requirements()))


TWO = Nodes(("n1", "n2"), (0, 0, 1, 1))


def test_the_layout_is_told():
    size, cores = judge(TWO, [[0], [1], [0], [1]], tasks=[(r, 4, r % 2, "srun") for r in range(4)])
    assert (size.status, cores.status) == (OK, OK)
    assert size.text == "4 ranks on 2 nodes, 2 each (n1, n2), Open MPI v5.0.11, started by srun"
    assert cores.text == "n1, n2: cores of its ranks 0 | 1"
    size, *cores = judge(TWO, [[0, 1], [0, 1], [2, 3], [2, 3]])
    assert [f.text for f in cores] == ["n1: each rank may use cores 0-1", "n2: each rank may use cores 2-3"]


@pytest.mark.parametrize(
    ("cores", "threads", "text"),
    [
        ([[0], [0], [0], [1]], 1, "n1: 2 ranks share 1 core. Start fewer on a node"),
        ([[0], [1], [0, 1], [0, 1]], 2, "n1, n2: 2 ranks compute with 4 threads on 2 cores. Set OMP_NUM_THREADS=1"),
    ],
)
def test_crowded_cores_are_told_once_for_all_nodes_alike(cores, threads, text):
    (found,) = [f for f in judge(TWO, cores, threads) if f.status == WARNING]
    assert found.text.startswith(text)
    assert found.nodes == (("n1",) if text.startswith("n1:") else ())


def test_ranks_on_the_same_core_while_others_are_free():
    (found,) = [f for f in judge(Nodes(("n1",), (0, 0, 0)), [[0], [0], [1, 2]]) if f.status == WARNING]
    assert found.text.startswith("n1: 2 ranks are bound to the same 1 of 3 cores. Set SLURM_CPUS_PER_TASK")


def test_unequal_nodes_are_told():
    found = judge(Nodes(("n1", "n2"), (0, 0, 0, 1)), [[0], [1], [2], [0]])
    text = "nodes must have the same number of ranks; n1 has 3, n2 has 1. Use --ntasks-per-node, or mpirun --map-by"
    assert found[0].text.startswith(text)


def test_a_launcher_that_contradicts_mpi():
    found = judge(TWO, [[0], [1], [0], [1]], tasks=[(3 - r, 4, r % 2, "srun") for r in range(4)])
    assert found[0].status == ERROR
    assert "the ranks must be the launcher's (srun): rank 3 of 4; got MPI's rank 0" in found[0].text


def test_tasks_must_be_mpis_ranks():
    def tasks(*local_ranks):
        return [Task(rank, len(local_ranks), local, "srun") for rank, local in enumerate(local_ranks)]

    world.check_tasks(tasks(0, 1, 0, 1), [0, 0, 1, 1])
    world.check_tasks(tasks(0, 2, 1), [0, 0, 0])  # another order than that of the ranks
    world.check_tasks([None], [0])
    for given, nodes, message in (
        ([Task(0, 2, 0, "srun")], [0], r"must be the launcher's \(srun\): rank 0 of 2; got MPI's rank 0 of 1"),
        ([Task(1, 2, 1, "srun"), Task(0, 2, 0, "srun")], [0, 0], "rank 1 of 2; got MPI's rank 0 of 2"),
        (tasks(0, 0), [0, 0], r"must be 0 to 1; got \[0, 0\] for ranks that share a node's memory"),
    ):
        with pytest.raises(WorldError, match=message):
            world.check_tasks(given, nodes)


def test_ranks_measure_their_cores(ranks):
    def body(comm):
        nodes = find_nodes(comm, "host")
        found = world.measure(comm, nodes, Requirements())
        return list(world.judge(found, nodes, Requirements())), found["ranks"][comm.rank]["cores"]

    for found, cores in ranks(body):
        assert cores and {f.status for f in found} <= {OK, WARNING}
        assert found[0].text.startswith(f"{ranks.size} rank")
