"""The world: launcher and MPI agree on it, every rank answers, and each has cores to run on. Comes before the checks.

Its first part needs neither torch nor a collective call: that of a wrong world is told at once, and where a rank can't
be reached nobody waits for it.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from hpcdist.comm import interfaces
from hpcdist.comm.launch import Task, check_world, declared_size, task
from hpcdist.doctor.base import ERROR, OK, WARNING, Asked, Finding, Nodes, counted, gather, listed, name_nodes
from hpcdist.errors import WorldError
from hpcdist.slurm.environment import allocation, check_tasks

if TYPE_CHECKING:
    from hpcdist.comm.communicator import Communicator

ANSWER_S = 10.0  # how long a rank may take to answer; not all start at the same moment
PASS_S = 2.5  # then also between two others; 3 s after the first packet Linux gives up, and Open MPI ends the job
ALL_PAIRS = 128  # of more nodes not every pair is tried
SLURM_S = 5.0  # how long Slurm may take to tell names


# --- whether there is one ---------------------------------------------------------------------------------------------
def disagreement(size: int, library: str, asked: Asked) -> str | None:
    """Why MPI's world is not the one that was started or asked for; None if it is."""
    environ = asked.environ
    try:
        check_world(size, library, environ)
    except WorldError as error:
        return str(error)
    tasks = environ.get("SLURM_NTASKS", "1")
    alone = size == 1 and declared_size(environ) is None and tasks.isdigit() and int(tasks) > 1
    wanted, who = (asked.ranks, "--ranks") if asked.ranks or not alone else (int(tasks), "SLURM_NTASKS")
    if wanted in (None, size):
        return None
    text = f"MPI's world must have {wanted} ranks ({who}); got {size} with {library}. "
    if declared_size(environ) is None:
        return f"{text}No launcher has started this process: put srun or mpirun before the command"
    return f"{text}Give the launcher that number (-n), and as many slots or tasks"


def silence(
    hosts: Mapping[int, str], missing: Sequence[int], expected: Sequence[str], waited_s: float
) -> list[Finding]:
    """What to say of ranks that did not answer: by node, where those that are expected are known.

    Args:
        hosts: the hosts of the ranks that have answered.
    """
    ranks = f"rank{'s' * (len(missing) > 1)} {counted(missing)}"
    text = f"every rank must answer; got nothing from {ranks} within {waited_s:g} s"
    advice = "It has ended, is stopped, or can't be reached by the network that MPI uses"
    here = {host.partition(".")[0] for host in hosts.values()}
    absent = [name for name in expected if name.partition(".")[0] not in here]
    if 0 not in hosts or not absent:
        return [Finding(ERROR, f"{text}. {advice}")]
    return [Finding(ERROR, f"{text}, nor from any rank on {name}. {advice}", (name,)) for name in absent]


def absence(names: Sequence[str], first: str, waited_s: float) -> Iterator[Finding]:
    """What to say of nodes that did not come to where all meet before MPI starts."""
    for name in names:
        text = f"{name} must come to {first} by TCP; it did not within {waited_s:g} s: it hangs, or can't reach {first}"
        yield Finding(WARNING, text, (name,))


def introduction(environ: Mapping[str, str]) -> str:
    """What a rank says of itself at the roll call: its node's name, and what it shares with the ranks there alone."""
    return f"{host_name(environ)}\n{interfaces.here()}"


def introduced(said: Mapping[int, str]) -> Nodes:
    """The nodes, once all ranks have introduced themselves."""
    hosts, places = zip(*(said[rank].split("\n") for rank in range(len(said))))
    return name_nodes(hosts, places)


def tried(count: int) -> list[tuple[int, int]]:
    """The pairs of nodes to try: all, or of very many those 1, 2, 4, ... places apart, as in collective calls."""
    steps = range(1, count) if count <= ALL_PAIRS else [1 << i for i in range((count - 1).bit_length())]
    return sorted({tuple(sorted((node, (node + step) % count))) for node in range(count) for step in steps})


def severed(pairs: Sequence[tuple[int, int]], nodes: Nodes, why: str) -> list[Finding]:
    """What to say of pairs of nodes that pass nothing, and `why` one thinks so: a line for a node with several."""
    found, left = [], [tuple(nodes.names[node] for node in pair) for pair in pairs]
    while left:
        counts = Counter(name for pair in left for name in pair)
        worst = max(counts, key=lambda name: (counts[name], nodes.names.index(name)))
        ends = [pair for pair in left if worst in pair]
        left = [pair for pair in left if worst not in pair]
        if len(ends) == 1:
            text, whose, out = f"the link {'-'.join(ends[0])} passes nothing", ends[0], "one of the two"
        else:
            others = [name for pair in ends for name in pair if name != worst]
            text, whose, out = f"the links from {worst} to {listed(others)} pass nothing", (worst,), worst
        text += f": {why}, though all reach {nodes.names[0]}. Leave {out} out, and tell the site: look at "
        found.append(Finding(ERROR, f"{text}cables, routes and firewalls between them", whose, weight=len(ends)))
    return found


def host_name(environ: Mapping[str, str]) -> str:
    """This node as Slurm calls it; elsewhere as it calls itself.

    Slurm tells every task of srun, but not every rank of an mpirun, which may pass on what it has been told itself.
    """
    told, host = task(environ), platform.node()
    if told is not None and told.launcher.startswith("srun") and "SLURMD_NODENAME" in environ:
        return environ["SLURMD_NODENAME"]
    return host.partition(".")[0] if "SLURM_JOB_ID" in environ else host


def allocated(environ: Mapping[str, str]) -> list[str]:
    """The nodes that Slurm has started ranks on; empty without Slurm, or where it does not answer."""
    found = allocation(environ)
    names = environ.get("SLURM_STEP_NODELIST") or (found.nodes if found else "")
    if not names:
        return []
    command = ["scontrol", "show", "hostnames", names]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SLURM_S, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


# --- how it lies on nodes and cores -----------------------------------------------------------------------------------
def measure(comm: Communicator, nodes: Nodes, asked: Asked) -> dict:
    """Collective. Of each rank: its cores, how many threads torch computes with, and what its launcher said."""
    import torch

    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    told = task(asked.environ)
    own = {"cores": cores, "threads": torch.get_num_threads(), "task": told}
    return {"ranks": gather(comm, own), "library": comm.library}


def judge(measured: dict, nodes: Nodes, asked: Asked) -> Iterator[Finding]:
    """How many ranks are where, each node's cores, and what is wrong with that."""
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
    yield from _together(nodes, {name: _cores(nodes.ranks(i), ranks) for i, name in enumerate(nodes.names)}, OK)
    yield from _together(nodes, {name: _crowding(nodes.ranks(i), ranks) for i, name in enumerate(nodes.names)}, WARNING)


def _together(nodes: Nodes, told: Mapping[str, str], status: str) -> Iterator[Finding]:
    """One line for all nodes that have the same to say; none for those that have nothing."""
    for text in dict.fromkeys(filter(None, told.values())):
        names = [name for name in nodes.names if told[name] == text]
        whose = tuple(names) if status != OK and len(names) == 1 < len(nodes.names) else ()
        yield Finding(status, f"{listed(names)}: {text}", whose)


def _cores(here: Sequence[int], ranks: Sequence[dict]) -> str:
    masks = [counted(ranks[rank]["cores"]) for rank in here]
    if len(set(masks)) == 1:
        return f"{'each rank' if len(masks) > 1 else 'the rank'} may use cores {masks[0]}"
    return f"cores of its ranks {' | '.join(masks)}"


def _crowding(here: Sequence[int], ranks: Sequence[dict]) -> str:
    """What is wrong with the cores of one node's ranks; empty if nothing."""
    there = {core for rank in here for core in ranks[rank]["cores"]}
    threads = sum(ranks[rank]["threads"] for rank in here)
    if len(there) < len(here):
        text = f"{len(here)} ranks share {len(there)} core{'s' * (len(there) > 1)}. "
        return f"{text}Start fewer on a node, or ask for more (--cpus-per-task)"
    for mask in {tuple(ranks[rank]["cores"]) for rank in here}:
        same = sum(tuple(ranks[rank]["cores"]) == mask for rank in here)
        if same > len(mask):
            text = f"{same} ranks are bound to the same {len(mask)} of {len(there)} cores. "
            return f"{text}Set SLURM_CPUS_PER_TASK and SRUN_CPUS_PER_TASK, or launch with mpirun --bind-to none"
    most = len(there) // len(here)
    if threads > len(there):
        return f"{len(here)} ranks compute with {threads} threads on {len(there)} cores. Set OMP_NUM_THREADS={most}"
    return ""
