"""What launchers and Slurm tell a process; the real ones tell it in tests/cluster/test_tasks_told.py."""

from __future__ import annotations

import pytest

from hpcdist.comm.launch import Task, task
from hpcdist.errors import WorldError
from hpcdist.tools.slurm.environment import Allocation, allocation, check_tasks, end_time

STEP = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8"}
DAEMON = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}  # of mpirun or mpiexec, on each node


def ompi(rank, size, local_rank):
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}, None),
        (STEP, Task(5, 8, 1, "srun")),
        ({**STEP, "PMIX_RANK": "5"}, Task(5, 8, 1, "srun --mpi=pmix")),
        ({**STEP, **PMI}, Task(5, 8, 1, "srun --mpi=pmi2")),
        ({**DAEMON, **PMI, "MPI_LOCALRANKID": "1"}, Task(5, 8, 1, "MPICH's or Intel's mpiexec")),
        ({**DAEMON, **ompi(5, 8, 1), "PMIX_RANK": "5"}, Task(5, 8, 1, "Open MPI's mpirun")),
    ],
    ids=["none", "batch-shell", "srun", "pmix", "pmi2", "mpiexec", "mpirun"],
)
def test_the_launcher_s_own_variables_count(environ, found):
    assert task(environ) == found


def test_a_variable_that_is_no_number_is_refused():
    with pytest.raises(WorldError, match=r"OMPI_COMM_WORLD_SIZE must be a number; got 'four'\..*mpirun or srun"):
        task(ompi(0, "four", 0))


@pytest.mark.parametrize(("rank", "local", "name"), [(4, 0, "RANK"), (0, 4, "LOCAL_RANK")])
def test_a_rank_beyond_the_size_is_refused(rank, local, name):
    with pytest.raises(WorldError, match=rf"COMM_WORLD_{name} must be below OMPI_COMM_WORLD_SIZE, 4; got 4"):
        task(ompi(rank, 4, local))


def world(*local_ranks, launcher="srun"):
    return [Task(rank, len(local_ranks), local, launcher) for rank, local in enumerate(local_ranks)]


def test_tasks_that_are_mpi_s_ranks_pass():
    check_tasks(world(0, 1, 0, 1), [0, 0, 1, 1])
    check_tasks(world(0, 2, 1), [0, 0, 0])  # another order than that of the ranks
    check_tasks([None], [0])


def test_worlds_of_size_1_are_refused():
    with pytest.raises(WorldError, match=r"must be the launcher's \(srun\): rank 0 of 2; got MPI's rank 0 of 1"):
        check_tasks([Task(0, 2, 0, "srun")], [0])


def test_ranks_in_another_order_are_refused():
    with pytest.raises(WorldError, match="rank 1 of 2; got MPI's rank 0 of 2"):
        check_tasks([Task(1, 2, 1, "srun"), Task(0, 2, 0, "srun")], [0, 0])


def test_two_ranks_of_one_gpu_are_refused():
    with pytest.raises(WorldError, match=r"must be 0 to 1; got \[0, 0\] for ranks that share a node's memory"):
        check_tasks(world(0, 0), [0, 0])


def test_what_slurm_gives():
    job = {"SLURM_JOB_ID": "70000", "SLURM_JOB_NODELIST": "n[1-3,7]", "SLURM_TASKS_PER_NODE": "2(x3),1"}
    assert allocation({}) is None
    assert allocation(job) == Allocation(70000, "n[1-3,7]", (2, 2, 2, 1), None, None, 0)
    array = {"SLURM_ARRAY_JOB_ID": "69990", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}
    assert allocation({**job, **array})[3:] == (69990, 3, 2)


def test_the_end_of_a_job():
    assert end_time({}) is None
    assert end_time({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1700000000"}) == 1.7e9


def test_a_job_whose_end_can_t_be_asked_for_trains_on():
    assert end_time({"SLURM_JOB_ID": "7", "PATH": ""}) is None
