"""What Slurm tells a process by its environment. Functions of a mapping; some ask Slurm in addition."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpcdist.comm.launch import Task, number, task
from hpcdist.errors import WorldError

FIRST_PORT, PORTS = 10_000, 20_000  # below what systems hand out to others, 32768 and up
ANSWERS_S = 30.0  # in which Slurm answers, or is not asked any more


def check_tasks(tasks: Sequence[Task | None], nodes: Sequence[int]) -> None:
    """Holds what the launcher told every rank against MPI's world.

    The local ranks of a node need not be in the order of its ranks (mpirun that maps by core deals them out another
    way), but each must be there once, for they choose the GPU.

    Args:
        tasks: of every rank, in the order of MPI's ranks; None where there was no launcher.
        nodes: the node of every rank, according to MPI.

    Raises:
        WorldError: a rank, the size or a node's local ranks are not MPI's.
    """
    for rank, found in enumerate(tasks):
        if found is not None and (found.rank, found.size) != (rank, len(tasks)):
            raise WorldError(
                f"the ranks must be the launcher's ({found.launcher}): rank {found.rank} of {found.size}; got MPI's "
                f"rank {rank} of {len(tasks)}. Launch with the mpirun of this MPI, or with the matching srun --mpi=..."
            )
    for node in sorted(set(nodes)):
        local = sorted(found.local_rank for found, where in zip(tasks, nodes) if where == node and found is not None)
        if local != list(range(len(local))):
            raise WorldError(
                f"the local ranks of a node must be 0 to {len(local) - 1}; got {local} for ranks that share a node's "
                "memory. Two of them would take one GPU: start one task per rank, with all of a node in one step."
            )


class Allocation(NamedTuple):
    """What a job has been given."""

    job: int
    nodes: str  # as Slurm writes it: n[1-4,7]
    tasks_per_node: tuple[int, ...]
    array_job: int | None
    array_task: int | None
    restarts: int  # how often it has been requeued


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """What Slurm has given to the job that this process belongs to; None outside of one."""
    if "SLURM_JOB_ID" not in environ:
        return None
    array_job, array_task, restarts = (
        number(environ, f"SLURM_{name}") if f"SLURM_{name}" in environ else None
        for name in ("ARRAY_JOB_ID", "ARRAY_TASK_ID", "RESTART_COUNT")
    )
    return Allocation(
        job=number(environ, "SLURM_JOB_ID"),
        nodes=environ.get("SLURM_JOB_NODELIST", ""),
        tasks_per_node=_counts(environ.get("SLURM_TASKS_PER_NODE", "")),
        array_job=array_job,
        array_task=array_task,
        restarts=restarts or 0,  # not set in the first run
    )


def _counts(text: str) -> tuple[int, ...]:
    """`2(x3),1` is 2, 2, 2, 1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return tuple(int(count) for count, times in found for _ in range(int(times or 1)))


def end_time(environ: Mapping[str, str]) -> float | None:
    """When Slurm will end this job, in seconds since 1970; None outside of a job, without a limit, or if not known."""
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    if "SLURM_JOB_END_TIME" in environ:  # of newer Slurms
        return float(number(environ, "SLURM_JOB_END_TIME"))
    try:
        told = _ask(["squeue", "--noheader", "--jobs", job, "--format", "%e"], {**environ, "SLURM_TIME_FORMAT": "%s"})
    except (OSError, subprocess.SubprocessError):
        return None  # a job trains on without
    first = told.split()[:1]
    return float(first[0]) if first and first[0].isdigit() else None


def rendezvous(environ: Mapping[str, str]) -> tuple[str, int]:
    """A host and a port where the ranks of this job, or of this step, can meet: the first node, and one of its ports.

    Two jobs on a node have different ports unless their numbers differ by a multiple of 20000.

    Raises:
        WorldError: outside of a job, or Slurm does not tell its nodes. There is no fall-back to localhost, where each
            node would wait for itself.
    """
    found = allocation(environ)
    if found is None:
        raise WorldError(
            "SLURM_JOB_ID must be set to find the host where ranks meet; got nothing. Run this inside a job, or give "
            "the address yourself."
        )
    launched = task(environ)
    of_srun = launched is not None and launched.launcher.startswith("srun")
    nodes = environ.get("SLURM_STEP_NODELIST", found.nodes) if of_srun else found.nodes
    try:
        hosts = _ask(["scontrol", "show", "hostnames", nodes], environ).split()
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        raise WorldError(
            f"scontrol show hostnames must tell the nodes of job {found.job}; got {reason!r} for {nodes!r}. Run this "
            "where Slurm's commands are on PATH."
        ) from None
    if not hosts:
        raise WorldError(
            f"scontrol show hostnames must tell the nodes of job {found.job}; got none for {nodes!r}. Is "
            "SLURM_JOB_NODELIST passed on to the ranks?"
        )
    return hosts[0], FIRST_PORT + found.job % PORTS


def _ask(command: Sequence[str], environ: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=ANSWERS_S, check=True)
    return done.stdout
