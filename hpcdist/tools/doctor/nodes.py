"""The nodes of the job: their names, from Slurm and from what ranks say, and which ranks live on each."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from hpcdist.comm.launch import task
from hpcdist.comm.network import interfaces
from hpcdist.tools.doctor.base import Nodes, gather
from hpcdist.tools.slurm.environment import allocation

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from hpcdist.comm.communicator import Communicator

SLURM_S = 5.0  # how long Slurm may take to expand a list of nodes


def find_nodes(comm: Communicator, host: str) -> Nodes:
    """Collective. Name the nodes by their hosts; where several have the same name, add their number."""
    return name_nodes(gather(comm, host), comm.memory.nodes)


def name_nodes(hosts: Sequence[str], places: Sequence[Hashable]) -> Nodes:
    """Name the nodes of ranks by their hosts; ranks of one node are at the same place."""
    first = {place: rank for rank, place in reversed([*enumerate(places)])}
    nodes = sorted(first, key=first.get)
    firsts = [hosts[first[place]] for place in nodes]
    names = [name if firsts.count(name) == 1 else f"{name}#{i}" for i, name in enumerate(firsts)]
    return Nodes(tuple(names), tuple(nodes.index(place) for place in places))


def introduction(environ: Mapping[str, str]) -> str:
    """Write down this rank's node: its name, and the network stack, which only ranks of that node share."""
    return f"{host_name(environ)}\n{interfaces.here()}"


def introduced_nodes(introductions: Mapping[int, str]) -> Nodes:
    """Read the nodes from the introductions of all ranks."""
    hosts, places = zip(*(introductions[rank].split("\n") for rank in range(len(introductions))))
    return name_nodes(hosts, places)


def host_name(environ: Mapping[str, str]) -> str:
    """Return the name of this node: under srun Slurm's; elsewhere its own.

    Slurm tells every task of srun, but not every rank of an mpirun, which may pass on the variables that it got itself.
    """
    own, host = task(environ), platform.node()
    if own is not None and own.launcher.startswith("srun") and "SLURMD_NODENAME" in environ:
        return environ["SLURMD_NODENAME"]
    return host.partition(".")[0] if "SLURM_JOB_ID" in environ else host


def allocated(environ: Mapping[str, str]) -> list[str]:
    """List the nodes that Slurm has started ranks on; none without Slurm, or where it does not answer."""
    found = allocation(environ)
    names = environ.get("SLURM_STEP_NODELIST") or (found.nodes if found else "")
    if not names:
        return []
    command = ["scontrol", "show", "hostnames", names]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SLURM_S, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []
