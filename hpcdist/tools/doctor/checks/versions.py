"""The software of each rank: versions must be the same."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator

from hpcdist import registry
from hpcdist.comm.communicator import Communicator
from hpcdist.session.run import required_versions
from hpcdist.tools.doctor.base import ERROR, OK, WARNING, Finding, Nodes, Requirements, counted, gather, listed

PLUGINS = "plug-ins"  # of other packages
REFUSED = ("hpcdist", "torch", "python", "mpi", PLUGINS)  # a run refuses different versions
OTHERS = ("numpy", "h5py", "mpi4py")


def measure(comm: Communicator, nodes: Nodes, required: Requirements) -> dict:
    """Collective. Gather each rank's versions by name."""
    versions = required_versions(comm)
    versions |= {name: importlib.import_module(name).__version__ for name in OTHERS}
    versions[PLUGINS] = ", ".join(registry.installed()) or "none"
    return {"versions": gather(comm, versions)}


def judge(measured: dict, nodes: Nodes, required: Requirements) -> Iterator[Finding]:
    """Report each package and node with another version than most ranks, or one line if all agree."""
    by_rank = measured["versions"]
    usual = {name: Counter(versions[name] for versions in by_rank).most_common(1)[0][0] for name in by_rank[0]}
    differs = False
    for name, version in usual.items():
        for node in sorted({nodes.of[rank] for rank, versions in enumerate(by_rank) if versions[name] != version}):
            ranks = [rank for rank in nodes.ranks(node) if by_rank[rank][name] != version]
            different = sorted({by_rank[rank][name] for rank in ranks})
            text = f"{name} must be the same on all ranks; got {listed(different)} on rank{'s' * (len(ranks) > 1)} "
            text += f"{counted(ranks)} ({nodes.names[node]}) and {version} on the others. "
            differs, status = True, ERROR if name in REFUSED else WARNING
            yield Finding(status, f"{text}Start all from the same environment", (nodes.names[node],))
    if not differs:
        listed_versions = [f"{name} {version}" for name, version in usual.items() if name != PLUGINS]
        yield Finding(OK, f"the same on all ranks: {', '.join(listed_versions)}")
