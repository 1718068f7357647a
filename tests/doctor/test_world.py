"""Whether the world is the one that was started, who does not answer, and how ranks lie on nodes and cores."""

from __future__ import annotations

import itertools
import platform

import pytest

from hpcdist.doctor import world
from hpcdist.doctor.base import ERROR, OK, WARNING, Asked, Nodes, find_nodes

LIBRARY = "Open MPI v5.0.11"
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def disagreement(size: int, environ: dict, ranks: int | None = None) -> str | None:
    return world.disagreement(size, LIBRARY, Asked(ranks=ranks, environ=environ))


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


# --- who does not answer ----------------------------------------------------------------------------------------------
def test_the_nodes_that_do_not_answer_are_named_where_they_are_known():
    hosts = {0: "n1.cluster", 1: "n1.cluster", 4: "n3.cluster"}
    found = world.silence(hosts, [2, 3, 5], ["n1", "n2", "n3", "n4"], 10)
    assert [(f.status, f.nodes) for f in found] == [(ERROR, ("n2",)), (ERROR, ("n4",))]
    text = "every rank must answer; got nothing from ranks 2-3, 5 within 10 s, nor from any rank on n2. It has ended"
    assert found[0].text.startswith(text)


@pytest.mark.parametrize(("hosts", "expected"), [({0: "n1"}, []), ({0: "n1"}, ["n1"]), ({3: "n1"}, ["n1", "n2"])])
def test_elsewhere_the_ranks_are(hosts, expected):
    (found,) = world.silence(hosts, [2], expected, 10)
    assert found.nodes == ()
    assert found.text.startswith("every rank must answer; got nothing from rank 2 within 10 s. It has ended")


def test_nodes_have_slurms_names_where_slurm_tells_every_rank():
    step = {**SRUN, "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "slurms-own"}
    assert world.host_name(step) == "slurms-own"
    own = platform.node()
    mpirun = {f"OMPI_COMM_WORLD_{what}": "1" for what in ("RANK", "SIZE", "LOCAL_RANK")}
    mpirun = {**step, **mpirun, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert world.host_name(mpirun) == own.partition(".")[0] and world.host_name({}) == own


def test_without_slurm_no_nodes_are_expected(monkeypatch, tmp_path):
    assert world.allocated({}) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert world.allocated({"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "n[1-4]"}) == [], "nobody answers"


def test_pairs_of_nodes_that_pass_nothing_are_told_by_node():
    nodes = Nodes(("n1", "n2", "n3", "n4", "n5"), (0, 1, 2, 3, 4))
    (link,) = world.severed([(1, 2)], nodes, "it did not come")
    assert (link.status, link.nodes, link.weight) == (ERROR, ("n2", "n3"), 1)
    assert link.text.startswith("the link n2-n3 passes nothing: it did not come, though all reach n1. Leave one of the")
    node, rest = world.severed([(1, 2), (2, 3), (2, 4), (1, 4)], nodes, "it did not come")
    assert (node.nodes, node.weight, rest.nodes) == (("n3",), 3, ("n2", "n5"))
    assert node.text.startswith("the links from n3 to n2, n4, n5 pass nothing: it did not come, though all reach n1.")


def test_all_pairs_are_tried_or_of_many_nodes_some_with_each():
    assert world.tried(1) == [] and world.tried(4) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    count = world.ALL_PAIRS + 3
    pairs = world.tried(count)
    assert {(0, 1), (0, 2), (0, 4), (0, 64), (0, 128), (0, count - 1)} <= set(pairs) and (0, 5) not in pairs
    assert all(0 <= a < b < count for a, b in pairs) and len(pairs) <= count * 8


def test_a_node_that_does_not_come_is_named():
    (found,) = world.absence(["n3"], "n1", 8)
    assert (found.status, found.nodes) == (WARNING, ("n3",))
    assert found.text == "n3 must come to n1 by TCP; it did not within 8 s: it hangs, or can't reach n1"


def test_ranks_that_introduce_themselves_are_sorted_by_node():
    said = {0: "a\nx", 1: "b\ny", 2: "a\nx", 3: "a\nz"}
    assert world.introduced(said) == Nodes(("a#0", "b", "a#2"), (0, 1, 0, 2))
    name, place = world.introduction({}).split("\n")
    assert name == platform.node() and place


@pytest.mark.mpi(min_size=2)
def test_real_ranks_reach_each_other(ranks):
    def body(comm):
        from hpcdist.comm import mpi_rollcall

        roll = mpi_rollcall.call(f"I am {comm.rank}", 20)
        return roll.said, mpi_rollcall.severed([*itertools.combinations(range(comm.size), 2)], 10)

    said = {rank: f"I am {rank}" for rank in range(ranks.size)}
    assert ranks(body) == [(said, [])] * ranks.size


# --- nodes and cores --------------------------------------------------------------------------------------------------
def judge(nodes: Nodes, cores: list, threads: int = 1, tasks: list | None = None):
    ranks = [{"cores": own, "threads": threads, "task": None} for own in cores]
    for row, told in zip(ranks, tasks or []):
        row["task"] = told
    return list(world.judge({"ranks": ranks, "library": LIBRARY}, nodes, Asked()))


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


def test_ranks_measure_their_cores(ranks):
    def body(comm):
        nodes = find_nodes(comm, "host")
        found = world.measure(comm, nodes, Asked())
        return list(world.judge(found, nodes, Asked())), found["ranks"][comm.rank]["cores"]

    for found, cores in ranks(body):
        assert cores and {f.status for f in found} <= {OK, WARNING}
        assert found[0].text.startswith(f"{ranks.size} rank")
