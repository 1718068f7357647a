"""The checks of clocks, versions, windows and the world: measured on ranks, and what is said of what was measured."""

from __future__ import annotations

import pytest

from harness.cases import each
from hpcdist.comm.launch import Task
from hpcdist.comm.virtual import Network, run_virtual
from hpcdist.errors import WorldError
from hpcdist.registry import catalogue
from hpcdist.tools.doctor.base import ERROR, OK, WARNING, Nodes, Requirements, find_nodes
from hpcdist.tools.doctor.checks import clocks, progress, versions, world

LIBRARY = "Open MPI v5.0.11"
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
TWO = Nodes(("n1", "n2"), (0, 0, 1, 1))


def test_checks_are_found_by_their_files_names():
    checks = catalogue("checks")
    assert {"clocks", "files", "gpus", "links", "progress", "versions", "world"} <= set(checks.available())
    for name in checks.available():
        check = checks.load(name)
        assert check.__doc__ and callable(check.measure) and callable(check.judge)


def test_ranks_are_measured_and_judged(ranks):
    def body(comm):
        nodes, found = find_nodes(comm, "host"), []
        for check in (clocks, versions, world):
            measured = check.measure(comm, nodes, Requirements())
            if comm.rank == 0:
                found.append(list(check.judge(measured, nodes, Requirements())))
        return found

    (clock,), (version,), (layout, *cores) = ranks(body)[0]
    assert clock.status == version.status == OK and "clock" in clock.text
    assert "the same on all ranks: hpcdist " in version.text and "h5py 3" in version.text
    assert layout.text.startswith(f"{ranks.size} rank") and {f.status for f in (layout, *cores)} <= {OK, WARNING}
    assert any(word in cores[0].text for word in ("may use cores", "cores of its ranks"))


# --- clocks -----------------------------------------------------------------------------------------------------------
def test_a_clock_that_is_off_is_measured_to_within_the_round_trip():
    ahead_s = (0.0, 0.002, -3.0)

    def body(comm):
        nodes = find_nodes(comm, f"n{comm.rank}")
        return clocks.measure(comm, nodes, Requirements(), lambda: 1e9 + comm.now() + ahead_s[comm.rank])

    found = run_virtual(body, 3, network=Network(latency_s=0.01, bandwidth_bytes_s=1e9))[0]["clocks"]
    assert found["n1"]["ahead_s"] == pytest.approx(0.002, abs=1e-5)
    assert found["n2"]["ahead_s"] == pytest.approx(-3.0, abs=1e-5)
    assert found["n1"]["error_s"] == pytest.approx(0.01, rel=0.01), "half of the round trip"


@each(
    "case",
    [
        ((0.001, -0.002), 1e-4, OK, (), "3 clocks, all within 2.1 ms of n1's"),
        ((0.001, -0.3), 1e-4, WARNING, ("n3",), "n3's clock is 300 ms behind n1's, it must be within 50 ms. Tell the"),
        ((2.0, 2.001), 1e-4, WARNING, ("n1",), "n1's clock is 2.0 s behind all others."),
        ((0.3, 0.0), 0.28, OK, (), "3 clocks"),  # a slow network is no wrong clock
    ],
)
def test_what_is_said_of_clocks(case):
    ahead_s, error_s, status, nodes, text = case
    measured = {name: {"ahead_s": s, "error_s": error_s} for name, s in zip(("n2", "n3"), ahead_s)}
    (finding,) = clocks.judge({"clocks": measured}, Nodes(("n1", "n2", "n3"), (0, 1, 2)), Requirements())
    assert (finding.status, finding.nodes) == (status, nodes) and finding.text.startswith(text)


# --- versions ---------------------------------------------------------------------------------------------------------
def test_what_is_said_of_versions():
    """Of those with which no run starts a difference is an error; of others a warning."""
    own = {"hpcdist": "1", "torch": "2.9", "mpi": "Open MPI", "python": "3.11", "numpy": "2.1"}

    def judge(*differing: dict):
        return list(versions.judge({"versions": [own | more for more in differing]}, TWO, Requirements()))

    (found,) = judge({}, {}, {}, {"torch": "2.8"})
    assert (found.status, found.nodes) == (ERROR, ("n2",))
    text = "torch must be the same on all ranks; got 2.8 on rank 3 (n2) and 2.9 on the others. Start all from the same"
    assert found.text.startswith(text)
    torch, numpy = judge({"numpy": "1.26"}, {}, {"torch": "2.8"}, {"torch": "2.8.1"})
    assert (numpy.status, numpy.nodes) == (WARNING, ("n1",))
    assert "got 2.8, 2.8.1 on ranks 2-3 (n2) and 2.9 on the others" in torch.text


# --- windows while their owner computes -------------------------------------------------------------------------------
@pytest.mark.mpi(min_size=2)
@each("way", [None, "tcp"])
def test_windows_of_real_ranks_are_measured(ranks, way):
    def body(comm):
        place = comm.apart(way) if way else comm.split(0)
        found = progress.measure(place, find_nodes(place, "host"), Requirements())
        place.close()
        return found

    found = ranks(body)[0]
    assert found["internode"] == way and found["asker"] == 1
    assert 0 < found["mpi_s"] < 10 and 0 < found["window_s"] < 10


def test_one_rank_waits_for_nobody(ranks):
    def body(comm):
        alone = comm.split(comm.rank)
        nodes = find_nodes(alone, "host")
        return list(progress.judge(progress.measure(alone, nodes, Requirements()), nodes, Requirements()))

    assert all(finding.text == "one rank: nobody to wait for" for (finding,) in ranks(body))


def test_an_mpi_that_waits_is_no_trouble_as_long_as_our_windows_do_not():
    def judge(mpi_s: float, window_s: float, internode: str | None):
        measured = {"asker": 1, "internode": internode, "mpi_s": mpi_s, "window_s": window_s, "library": LIBRARY}
        (finding,) = progress.judge(measured, TWO, Requirements())
        return finding.status, finding.text

    assert judge(0.39, 0.004, "tcp") == (
        OK, f"{LIBRARY}: one-sided calls to another node wait for an owner that computes (worst 390 ms); windows go "
        "by tcp, worst 4 ms",
    )  # fmt: skip
    text = "within the node progress while the owner computes (worst 1 ms); windows go by shared memory"
    assert text in judge(1e-3, 1e-4, None)[1]
    status, text = judge(0.39, 0.39, "rma")
    assert status == WARNING and "windows go by rma, worst 390 ms. Leave a core free on each node" in text


# --- one world of the right size --------------------------------------------------------------------------------------
def test_a_world_is_of_the_size_that_was_started_and_asked_for():
    def disagreement(size: int, environ: dict, ranks: int | None = None) -> str | None:
        return world.disagreement(size, LIBRARY, Requirements(ranks=ranks, environ=environ))

    for size, environ, asked in ((4, SRUN, None), (4, SRUN, 4), (1, {}, None), (3, {}, 3)):
        assert disagreement(size, environ, asked) is None
    text = disagreement(1, SRUN)
    assert f"MPI's world must be the launcher's, 4 (srun); got 1 with {LIBRARY}" in text
    assert "`srun --mpi=pmix` for Open MPI, `srun --mpi=pmi2` for MPICH" in text
    assert disagreement(4, SRUN, ranks=8).startswith(f"MPI's world must have 8 ranks (--ranks); got 4 with {LIBRARY}")
    assert disagreement(1, {}, ranks=2).endswith("put srun or mpirun before the command")
    text = disagreement(1, {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"})
    assert text.startswith(f"MPI's world must have 8 ranks (SLURM_NTASKS); got 1 with {LIBRARY}. No launcher has")
    assert disagreement(4, {"SLURM_NTASKS": "2", "OMPI_COMM_WORLD_SIZE": "4"}) is None, "of mpirun's daemons"


# --- nodes and cores --------------------------------------------------------------------------------------------------
def judge(nodes: Nodes, cores: list, threads: int = 1, tasks: list | None = None):
    told = tasks or [None] * len(cores)
    ranks = [{"cores": own, "threads": threads, "task": task} for own, task in zip(cores, told)]
    return list(world.judge({"ranks": ranks, "library": LIBRARY}, nodes, Requirements()))


def test_the_layout_is_told():
    size, cores = judge(TWO, [[0], [1], [0], [1]], tasks=[(r, 4, r % 2, "srun") for r in range(4)])
    assert (size.status, cores.status) == (OK, OK)
    assert size.text == f"4 ranks on 2 nodes, 2 each (n1, n2), {LIBRARY}, started by srun"
    assert cores.text == "n1, n2: cores of its ranks 0 | 1"
    size, *cores = judge(TWO, [[0, 1], [0, 1], [2, 3], [2, 3]])
    assert [f.text for f in cores] == ["n1: each rank may use cores 0-1", "n2: each rank may use cores 2-3"]
    text = "nodes must have the same number of ranks; n1 has 3, n2 has 1. Use --ntasks-per-node, or mpirun --map-by"
    assert judge(Nodes(("n1", "n2"), (0, 0, 0, 1)), [[0], [1], [2], [0]])[0].text.startswith(text)


@each(
    "case",
    [
        (TWO, [[0], [0], [0], [1]], 1, ("n1",), "n1: 2 ranks share 1 core. Start fewer on a node"),
        (TWO, [[0], [1], [0, 1], [0, 1]], 2, (),
         "n1, n2: 2 ranks compute with 4 threads on 2 cores. Set OMP_NUM_THREADS=1"),
        (Nodes(("n1",), (0, 0, 0)), [[0], [0], [1, 2]], 1, (),
         "n1: 2 ranks are bound to the same 1 of 3 cores. Set SLURM_CPUS_PER_TASK"),
    ],
)  # fmt: skip
def test_crowded_cores_are_told_once_for_all_nodes_alike(case):
    nodes, cores, threads, whose, text = case
    (found,) = [f for f in judge(nodes, cores, threads) if f.status == WARNING]
    assert found.text.startswith(text) and found.nodes == whose


def test_tasks_must_be_mpis_ranks():
    found = judge(TWO, [[0], [1], [0], [1]], tasks=[(3 - r, 4, r % 2, "srun") for r in range(4)])
    assert found[0].status == ERROR
    assert "the ranks must be the launcher's (srun): rank 3 of 4; got MPI's rank 0" in found[0].text

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
