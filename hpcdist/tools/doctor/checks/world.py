"""MPI's world: agreement with the launcher, and cores for each rank. Runs before the other checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hpcdist.comm.launch import Task, check_world, launched_size, task
from hpcdist.errors import WorldError
from hpcdist.records import local_cores_of_host
from hpcdist.tools.doctor.base import ERROR, OK, WARNING, Finding, Nodes, Requirements, gather, listed
from hpcdist.tools.machine import describe_cores

if TYPE_CHECKING:
    from hpcdist.comm.communicator import Communicator


# --- size -------------------------------------------------------------------------------------------------------------
def disagreement(size: int, library: str, required: Requirements) -> str | None:
    """Return why MPI's world is not the one that was started or requested; None if it is."""
    environ = required.environ
    try:
        check_world(size, library, environ)
    except WorldError as error:
        return str(error)
    tasks = environ.get("SLURM_NTASKS", "1")  # alone: without launcher, though the allocation has several tasks
    alone = size == 1 and launched_size(environ) is None and tasks.isdigit() and int(tasks) > 1
    expected, source = (required.ranks, "--ranks") if required.ranks or not alone else (int(tasks), "SLURM_NTASKS")
    if expected in (None, size):
        return None
    text = f"MPI's world must have {expected} ranks ({source}); got {size} with {library}. "
    if launched_size(environ) is None:
        return f"{text}No launcher has started this process: put srun or mpirun before the command"
    return f"{text}Give the launcher that number (-n), and the same number of slots or tasks"


# --- nodes and cores --------------------------------------------------------------------------------------------------
def measure(comm: Communicator, nodes: Nodes, required: Requirements) -> dict:
    """Collective. Gather each rank's cores, torch's number of threads, and the launcher's rank and size."""
    import torch

    _, cores = local_cores_of_host()
    row = {"cores": cores, "threads": torch.get_num_threads(), "task": task(required.environ)}
    return {"ranks": gather(comm, row), "library": comm.platform.library}


def judge(measured: dict, nodes: Nodes, required: Requirements) -> Iterator[Finding]:
    """Report the ranks and cores of each node, and problems with them."""
    ranks = measured["ranks"]
    tasks = [Task(*row["task"]) if row["task"] else None for row in ranks]
    try:
        check_tasks(tasks, nodes.of)
    except WorldError as error:
        yield Finding(ERROR, str(error))
    counts = {name: len(nodes.ranks(node)) for node, name in enumerate(nodes.names)}
    each = ", ".join(f"{name} has {count}" for name, count in counts.items())
    equal = len(set(counts.values())) == 1
    if not equal:
        text = f"nodes must have the same number of ranks; {each}. Use --ntasks-per-node, or mpirun --map-by ppr:N:node"
        yield Finding(WARNING, text)
    launcher = f", started by {tasks[0].launcher}" if tasks[0] else ""
    text = f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {len(nodes.names)} node{'s' * (len(nodes.names) > 1)}"
    text += f", {next(iter(counts.values()))} each" * (equal and len(nodes.names) > 1)
    yield Finding(OK, f"{text} ({nodes}), {measured['library']}{launcher}")
    for text in describe_cores([(nodes.name(rank), row["cores"]) for rank, row in enumerate(ranks)]):
        yield Finding(OK, text)
    crowding = {name: _crowding(nodes.ranks(node), ranks) for node, name in enumerate(nodes.names)}
    for text in dict.fromkeys(filter(None, crowding.values())):
        names = [name for name in nodes.names if crowding[name] == text]
        yield Finding(WARNING, f"{listed(names)}: {text}", tuple(names) if len(names) == 1 < len(nodes.names) else ())


def check_tasks(tasks: Sequence[Task | None], nodes: Sequence[int]) -> None:
    """Compare the launcher's ranks, size and local ranks with MPI's; raise WorldError if a value differs.

    Local ranks may be in another order than ranks (for example with mpirun --map-by core), but each must occur once per
    node, because a local rank selects the GPU.
    """
    for rank, started in enumerate(tasks):
        if started is not None and (started.rank, started.size) != (rank, len(tasks)):
            raise WorldError(
                f"the ranks must be the launcher's ({started.launcher}): rank {started.rank} of {started.size}; got "
                f"MPI's rank {rank} of {len(tasks)}. Launch with the mpirun of this MPI, or the matching srun --mpi=..."
            )
    for node in sorted(set(nodes)):
        local = sorted(
            started.local_rank for started, of_node in zip(tasks, nodes) if of_node == node and started is not None
        )
        if local != list(range(len(local))):
            raise WorldError(
                f"the local ranks of a node must be 0 to {len(local) - 1}; got {local} for ranks that share a node's "
                "memory. Two ranks would use one GPU: start one task per rank, with all of a node in one step."
            )


def _crowding(on_node: Sequence[int], ranks: Sequence[dict]) -> str:
    """Return what is wrong with the cores of one node's ranks (`on_node`); empty if nothing."""
    cores = {core for rank in on_node for core in ranks[rank]["cores"]}
    threads = sum(ranks[rank]["threads"] for rank in on_node)
    if len(cores) < len(on_node):
        text = f"{len(on_node)} ranks share {len(cores)} core{'s' * (len(cores) > 1)}. "
        return f"{text}Start fewer on a node, or request more (--cpus-per-task)"
    for mask in {tuple(ranks[rank]["cores"]) for rank in on_node}:
        n_same = sum(tuple(ranks[rank]["cores"]) == mask for rank in on_node)
        if n_same > len(mask):
            text = f"{n_same} ranks are bound to the same {len(mask)} of {len(cores)} cores. "
            return f"{text}Set SLURM_CPUS_PER_TASK and SRUN_CPUS_PER_TASK, or launch with mpirun --bind-to none"
    limit = len(cores) // len(on_node)
    if threads > len(cores):
        return f"{len(on_node)} ranks compute with {threads} threads on {len(cores)} cores. Set OMP_NUM_THREADS={limit}"
    return ""
