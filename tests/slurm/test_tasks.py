"""What launchers and Slurm tell a process; the real ones tell it in tests/cluster/test_launchers.py."""

from __future__ import annotations

import pytest

from hpcdist.comm.launch import Task, job_end, task
from hpcdist.errors import WorldError

STEP = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8"}
DAEMON = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}  # of mpirun or mpiexec, on each node


def ompi(rank, size, local_rank):
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}


def test_the_launcher_s_own_variables_count():
    for environ, found in (
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}, None),  # of a batch shell
        (STEP, Task(5, 8, 1, "srun")),
        ({**STEP, "PMIX_RANK": "5"}, Task(5, 8, 1, "srun --mpi=pmix")),
        ({**STEP, **PMI}, Task(5, 8, 1, "srun --mpi=pmi2")),
        ({**DAEMON, **PMI, "MPI_LOCALRANKID": "1"}, Task(5, 8, 1, "MPICH's or Intel's mpiexec")),
        ({**DAEMON, **ompi(5, 8, 1), "PMIX_RANK": "5"}, Task(5, 8, 1, "Open MPI's mpirun")),
    ):
        assert task(environ) == found
    with pytest.raises(WorldError, match=r"OMPI_COMM_WORLD_SIZE must be a number; got 'four'\..*mpirun or srun"):
        task(ompi(0, "four", 0))
    for rank, local, name in ((4, 0, "RANK"), (0, 4, "LOCAL_RANK")):
        with pytest.raises(WorldError, match=rf"COMM_WORLD_{name} must be below OMPI_COMM_WORLD_SIZE, 4; got 4"):
            task(ompi(rank, 4, local))


def test_the_end_of_a_job_which_trains_on_where_it_can_t_be_asked_for(monkeypatch):
    assert job_end({}) is None
    assert job_end({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1700000000"}) == 1.7e9
    monkeypatch.setenv("PATH", "")
    assert job_end({"SLURM_JOB_ID": "7"}) is None
