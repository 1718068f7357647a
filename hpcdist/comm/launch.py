"""Rank and number of ranks according to the launcher (mpirun, srun...), to compare with MPI's world.

With the wrong launcher N processes each see a world of size 1, and each would train alone: Open MPI 5.0 under MPICH's
mpiexec, or under srun with the wrong PMI. MPICH 5.0 under Open MPI's mpirun exits in MPI_Init: "unsupported PMI version
PMIx".
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from hpcdist.errors import WorldError


class Task(NamedTuple):
    """The rank of this process, according to its launcher."""

    rank: int
    size: int
    local_rank: int  # among the ranks of its node
    launcher: str


class Variables(NamedTuple):
    """The environment variables in which a launcher passes rank and size."""

    launcher: str
    rank: str
    size: str
    local_rank: str


# Other launchers come before srun: under mpirun Slurm's variables describe mpirun's daemon. PMIx has no variable for
# the size, and tasks of srun have Slurm's with any PMI. The shell of a batch script has SLURM_PROCID, but no step
# variables.
LAUNCHERS = (
    Variables("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    Variables("MVAPICH2's mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    Variables("MPICH's or Intel's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    Variables("srun --mpi=pmi2", "PMI_RANK", "PMI_SIZE", "SLURM_LOCALID"),
    Variables("PALS's mpiexec", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"),
    Variables("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    Variables("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    Variables("srun --mpi=pmix", "PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    Variables("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)

# These only prove that a world of one rank is wrong, and must all be set. Launchers without MPI: a job under mpirun may
# inherit their variables, and hpcdist.init() sets torchrun's. PALS: the size counts the ranks of a node.
PLURAL = (
    Variables("torchrun, accelerate launch or their like", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    Variables("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK"),
    Variables("PALS's mpiexec", "PALS_RANKID", "PALS_LOCAL_SIZE", "PALS_LOCAL_RANKID"),
)

# Variables that a launcher or MPI sets in a process (prefixes), and those that hpcdist.init() sets.
LAUNCHED = (
    *("HPCDIST_LAUNCH", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMIX_", "PMI_", "PRTE_JOB", "HYDRA_"),
    *("PALS_", "FLUX_JOB_", "FLUX_TASK_", "JSM_NAMESPACE_", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_"),
)
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# In Open MPI's MPI_Finalize ranks wait for each other through the launcher, often forever if one has died. With this
# setting they don't; they must then have synchronized before (`Process.close` does).
ASYNC_FINALIZE = {"OMPI_MCA_async_mpi_finalize": "1"}

SLURM_REPLY_S = 60.0  # time limit for the reply of a busy Slurm controller


def launched_size(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the number of ranks that the launcher started and the launcher's name; None without a launcher."""
    ordered = sorted(LAUNCHERS, key=lambda variables: not all(name in environ for name in variables[1:]))
    for variables in ordered:  # launchers with all variables set come first: others may share a variable
        if environ.get(variables.size, "").isdigit():
            return int(environ[variables.size]), variables.launcher
    return None


def task(environ: Mapping[str, str]) -> Task | None:
    """Return this process's rank and size according to its launcher; None without a launcher.

    Raises:
        WorldError: the launcher's variables contradict each other.
    """
    variables = next((each for each in LAUNCHERS if all(name in environ for name in each[1:])), None)
    if variables is None:
        return None
    rank, size, local_rank = (number(environ, name) for name in variables[1:])
    for name, value in ((variables.rank, rank), (variables.local_rank, local_rank)):
        if value >= size:
            raise WorldError(
                f"{name} must be below {variables.size}, {size}; got {value}. Variables of two launchers are mixed: "
                "start the ranks from a shell that no other launcher has started."
            )
    return Task(rank, size, local_rank, variables.launcher)


def task_or_none(environ: Mapping[str, str]) -> Task | None:
    """Return the same as `task`; None also if the launcher's variables contradict each other."""
    with suppress(WorldError):
        return task(environ)
    return None


def launch_command(environ: Mapping[str, str], ranks: int) -> list[str]:
    """Return the start of a command for `ranks` ranks with this process's launcher, such as mpirun -n 4; or [].

    `hpcdist run` sets HPCDIST_LAUNCH, to itself and its options.
    """
    if "HPCDIST_LAUNCH" in environ:
        return shlex.split(environ["HPCDIST_LAUNCH"])
    own = task_or_none(environ)
    if own is None:
        return []
    program = own.launcher if own.launcher.startswith("srun") else own.launcher.rpartition(" ")[2]
    return [*program.split(), "-n", str(ranks)]


def number(environ: Mapping[str, str], name: str) -> int:
    """Read an integer from an environment variable; raise WorldError if it is not a number."""
    if not environ[name].isdigit():
        raise WorldError(
            f"{name} must be a number; got {environ[name]!r}. The launcher sets it: start ranks with mpirun or srun."
        )
    return int(environ[name])


def unlaunched(environ: Mapping[str, str]) -> dict[str, str]:
    """Copy an environment without a launcher's variables, to start a separate job from a rank of this one."""
    kept = (name for name in environ if name not in TORCHRUN_VARIABLES and not name.startswith(LAUNCHED))
    return {name: environ[name] for name in kept}


def contradiction(size: int, environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the launcher's number of ranks and its name if MPI's world size differs from it, else None.

    If MPI and its launcher agree on one rank, or there is no launcher, the variables of `PLURAL` count.
    """
    launched = launched_size(environ)
    if size == 1 and (launched or (1, ""))[0] == 1:
        complete = (each for each in PLURAL if all(environ.get(name, "").isdigit() for name in (each.rank, each.size)))
        launched = max(((int(environ[each.size]), each.launcher) for each in complete), default=None)
    return None if launched is None or launched[0] == size else launched


def check_world(size: int, library: str, environ: Mapping[str, str]) -> None:
    """Check that MPI's world has the size that the launcher started; raise WorldError otherwise."""
    mismatch = contradiction(size, environ)
    if mismatch is None:
        return
    count, launcher = mismatch
    command = shlex.join(["python", *sys.argv])
    advice = f"Launch with the mpirun of that same MPI: `mpirun -n {count} {command}`"
    if any(launcher == each.launcher for each in PLURAL):
        advice = f"hpcdist needs MPI, which that launcher does not start. Run `mpirun -n {count} {command}`"
    variable = next(each.size for each in (*LAUNCHERS, *PLURAL) if each.launcher == launcher and each.size in environ)
    if size == 1 and "SLURM_PTY_PORT" in environ:  # the shell of this process is one of several tasks
        advice = f"This is a shell of `srun --pty`: start it with one task, `srun -n 1 --pty bash`. {advice}"
    raise WorldError(
        f"the number of ranks in MPI's world must be the launcher's, {count} ({launcher}); got {size} with "
        f"{library}. Each process would train alone. {advice} (`python -m mpi4py --mpi-lib-version` names the MPI), or "
        "under Slurm with srun and the matching PMI: `srun --mpi=pmix` for Open MPI, `srun --mpi=pmi2` for MPICH. To "
        f"run without a launcher, unset {variable}."
    )


def tolerates_deaths(environ: Mapping[str, str]) -> bool:
    """Return whether the other ranks continue when a rank dies: under `mpirun --with-ft ulfm`."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "0").lower() in ("1", "true")


def job_end(environ: Mapping[str, str]) -> float | None:
    """Return the time at which Slurm will end the job of this process, in seconds since 1970.

    None outside of a job, without a time limit, or if Slurm does not reply: the job then trains without knowing it.
    """
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    if "SLURM_JOB_END_TIME" in environ:  # of newer Slurms
        return float(number(environ, "SLURM_JOB_END_TIME"))
    command, as_timestamp = ["squeue", "--noheader", "--jobs", job, "--format", "%e"], {"SLURM_TIME_FORMAT": "%s"}
    try:
        reply = subprocess.run(
            command, env={**environ, **as_timestamp}, capture_output=True, text=True, timeout=SLURM_REPLY_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return float(reply.stdout) if reply.stdout.strip().isdigit() else None
