"""What the launcher said about the number of ranks, to hold against what MPI found.

The wrong launcher (another MPI's mpirun, or srun with the wrong PMI) starts N processes that each see a world of
size 1, without any error; each then trains alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcdist.errors import WorldError

# The launcher's own variable comes before Slurm's: under mpirun inside a Slurm job, Slurm's count is that of mpirun's
# daemons. SLURM_STEP_NUM_TASKS is set for srun's tasks only, so a batch script that starts python itself counts as 1.
SIZE_VARIABLES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "a PMI launcher (MPICH's or Intel's mpiexec, srun --mpi=pmi2)",
    "MV2_COMM_WORLD_SIZE": "MVAPICH2's mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}

# In Open MPI's MPI_Finalize ranks wait for each other through the launcher, often for ever where one has died. Without
# that they need to have met before (`comm/mpi.py` sees to it).
FINALIZE_ALONE = {"OMPI_MCA_async_mpi_finalize": "1"}


def declared_size(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """The number of ranks that the launcher started and the launcher's name; None if there was no launcher."""
    for variable, launcher in SIZE_VARIABLES.items():
        if environ.get(variable, "").isdigit():
            return int(environ[variable]), launcher
    return None


def check_world(size: int, library: str, environ: Mapping[str, str]) -> None:
    """Raises WorldError if MPI's world has another size than the launcher declared."""
    declared = declared_size(environ)
    if declared is None or declared[0] == size:
        return
    count, launcher = declared
    raise WorldError(
        f"the number of ranks in MPI's world must be the launcher's, {count} ({launcher}); got {size} with "
        f"{library}. Each process would train alone. Launch with the mpirun of that same MPI "
        "(`python -m mpi4py --mpi-lib-version` names it), or under Slurm with the matching PMI: "
        "`srun --mpi=pmix` for Open MPI, `srun --mpi=pmi2` for MPICH."
    )


def tolerates_deaths(environ: Mapping[str, str]) -> bool:
    """Whether the launcher keeps the job going when a rank dies, and MPI tells the others: mpirun --with-ft ulfm."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "0").lower() in ("1", "true")
