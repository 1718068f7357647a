"""The software of each rank: all must run the same."""

from __future__ import annotations

import importlib
import platform
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hpcdist
from hpcdist.doctor.base import ERROR, OK, WARNING, Asked, Finding, Nodes, counted, gather, listed

if TYPE_CHECKING:
    from hpcdist.comm.communicator import Communicator

REFUSED = ("hpcdist", "torch", "python", "mpi")  # no run starts with two of them
OTHERS = ("numpy", "h5py", "mpi4py")


def measure(comm: Communicator, nodes: Nodes, asked: Asked) -> dict:
    """Collective. Each rank's versions, by name."""
    import torch

    own = {"hpcdist": hpcdist.__version__, "torch": torch.__version__, "mpi": comm.library}
    own["python"] = ".".join(platform.python_version_tuple()[:2])
    own |= {name: importlib.import_module(name).__version__ for name in OTHERS}
    return {"versions": gather(comm, own)}


def judge(measured: dict, nodes: Nodes, asked: Asked) -> Iterator[Finding]:
    """A line for each package and node that differs from what most ranks have; or one for all."""
    told = measured["versions"]
    usual = {name: Counter(versions[name] for versions in told).most_common(1)[0][0] for name in told[0]}
    differs = False
    for name, version in usual.items():
        for node in sorted({nodes.of[rank] for rank, versions in enumerate(told) if versions[name] != version}):
            ranks = [rank for rank in nodes.ranks(node) if told[rank][name] != version]
            theirs = sorted({told[rank][name] for rank in ranks})
            text = f"{name} must be the same on all ranks; got {listed(theirs)} on rank{'s' * (len(ranks) > 1)} "
            text += f"{counted(ranks)} ({nodes.names[node]}) and {version} elsewhere. "
            differs, status = True, ERROR if name in REFUSED else WARNING
            yield Finding(status, f"{text}Start all from the same environment", (nodes.names[node],))
    if not differs:
        yield Finding(OK, "the same on all ranks: " + ", ".join(f"{name} {usual[name]}" for name in usual))
