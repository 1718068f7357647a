"""Read what Slurm says about a job in the environment of its processes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpcdist.comm.launch import Task, number
from hpcdist.errors import WorldError

TIMEOUT_S = 30.0  # of a question to Slurm


def check_tasks(tasks: Sequence[Task | None], nodes: Sequence[int]) -> None:
    """Compare the launcher's ranks, size and local ranks with MPI's.

    The local ranks of a node need not be in the order of its ranks (mpirun that maps by core orders them otherwise),
    but there must be one of each, because a local rank chooses the GPU.

    Args:
        tasks: the launcher's values for every rank, in the order of MPI's ranks; None where there was no launcher.
        nodes: the node of every rank, according to MPI.

    Raises:
        WorldError: a rank, the size or a node's local ranks are not MPI's.
    """
    for rank, task in enumerate(tasks):
        if task is not None and (task.rank, task.size) != (rank, len(tasks)):
            raise WorldError(
                f"the ranks must be the launcher's ({task.launcher}): rank {task.rank} of {task.size}; got MPI's "
                f"rank {rank} of {len(tasks)}. Launch with the mpirun of this MPI, or with the matching srun --mpi=..."
            )
    for node in sorted(set(nodes)):
        local = sorted(task.local_rank for task, where in zip(tasks, nodes) if where == node and task is not None)
        if local != list(range(len(local))):
            raise WorldError(
                f"the local ranks of a node must be 0 to {len(local) - 1}; got {local} for ranks that share a node's "
                "memory. Two of them would take one GPU: start one task per rank, with all of a node in one step."
            )


class Allocation(NamedTuple):
    """The nodes and tasks of a job."""

    job: int
    nodes: str  # as Slurm writes it: n[1-4,7]
    tasks_per_node: tuple[int, ...]
    array_job: int | None
    array_task: int | None
    restarts: int  # how often it has been requeued


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of the job that this process belongs to; None outside of a job."""
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
    """Expand Slurm's repeat counts: `2(x3),1` is 2, 2, 2, 1."""
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return tuple(int(count) for count, times in pairs for _ in range(int(times or 1)))


def end_time(environ: Mapping[str, str]) -> float | None:
    """Return the time at which Slurm will end this job, in seconds since 1970.

    None outside of a job, without a time limit, or where Slurm does not answer.
    """
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    if "SLURM_JOB_END_TIME" in environ:  # of newer Slurms
        return float(number(environ, "SLURM_JOB_END_TIME"))
    try:
        output = _ask(["squeue", "--noheader", "--jobs", job, "--format", "%e"], {**environ, "SLURM_TIME_FORMAT": "%s"})
    except (OSError, subprocess.SubprocessError):
        return None  # the job trains on without knowing it
    first = output.split()[:1]
    return float(first[0]) if first and first[0].isdigit() else None


def _ask(command: Sequence[str], environ: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return done.stdout
