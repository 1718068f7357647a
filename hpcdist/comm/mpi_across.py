"""How windows are read and written across nodes: two ways, and the self-test that chooses between them.

Requests over TCP to the owner's threads (`comm/mpi_tcp.py`), or MPI's one-sided calls (`comm/mpi_rma.py`). Which one
is faster depends on the network and on the MPI library by a factor of a hundred either way, and the question is not
how fast it is while the owner waits inside MPI, but while it computes. So that is measured, once per machine, library
and number of nodes.
"""

from __future__ import annotations

import json
import platform
import time
import warnings
from typing import Protocol

import torch
from mpi4py import MPI
from torch import Tensor

from hpcdist.comm import cache, mpi
from hpcdist.errors import UnknownNameError

WAYS = ("tcp", "rma")  # requests to the owner's threads; MPI's one-sided calls
COUNT = 1 << 16  # elements of float32 in a large transfer of the self-test
SPAN_S = 0.1  # how long the owner computes for each way and kind of computation
WORTH = 1.2  # one-sided calls must be faster by this factor: the difference must be more than noise


class Across(Protocol):
    """A window's transfers to and from ranks of other nodes. Each is complete at both ends when it returns."""

    def get(self, out: Tensor, rank: int, offset: int) -> None: ...
    def put(self, values: Tensor, rank: int, offset: int) -> None: ...
    def close(self) -> None: ...


def choose(comm: mpi.MpiCommunicator, wanted: str) -> str:
    """Collective. The way that is wanted, or for `auto` the faster one: from the cache, or measured.

    Where a rank's death is survived it is `tcp`, whatever is wanted. Rank 0 alone reads and writes the cache.
    """
    if wanted not in (*WAYS, "auto"):
        raise UnknownNameError("across", wanted, (*WAYS, "auto"))
    if comm.tolerant:
        return "tcp"  # a connection breaks when its peer dies; MPI's one-sided calls may then wait for ever
    if wanted != "auto":
        return wanted
    hosts = len(set(comm.exchange(platform.node().encode())))
    path = cache.cache_file("across", mpi.library(), len(set(comm.nodes)), hosts)
    found = comm.exchange(_read(path).encode() if comm.rank == 0 else b"")[0].decode()
    if found:
        return found
    seconds = measure(comm)
    way = "rma" if seconds["rma"] * WORTH < seconds["tcp"] else "tcp"
    if comm.rank == 0:
        cache.keep(path, json.dumps({"way": way, "seconds": seconds}, indent=1))
    return way


def _read(path) -> str:
    """The way that a file names; empty if there is none."""
    try:
        way = json.loads(path.read_bytes())["way"]
        if way in WAYS:
            return way
        reason = f"unknown way {way!r}"
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    warnings.warn(f"{path} does not say how windows are read across nodes ({reason}); measuring anew.", stacklevel=4)
    return ""


def measure(comm: mpi.MpiCommunicator) -> dict[str, float]:
    """Collective. Seconds that a small get, a large get and a large put take together, by way, on all ranks alike.

    The owner computes meanwhile: half of the time in torch, which gives up the interpreter lock, half in Python,
    which keeps it. Rank 0 owns the memory, the first rank of another node reads and writes it, the others wait.
    """
    from hpcdist.comm.mpi_window import MpiWindow  # which needs this module

    own = comm.split(0)
    asker = next(rank for rank in range(comm.size) if comm.nodes[rank] != comm.nodes[0])
    taken_s = {}
    for way in WAYS:
        window = MpiWindow(own, COUNT if own.rank == 0 else 0, torch.float32, across=way)
        taken_s[way] = 0.0
        if own.rank == asker:
            window.get(torch.empty(1), 0)  # connects
        for keeps_lock in (False, True):
            own.barrier()
            if own.rank == 0:
                _compute(SPAN_S, keeps_lock)
            elif own.rank == asker:
                taken_s[way] += _transfer(window, SPAN_S) / 2
        window.close()
    found = json.loads(own.exchange(json.dumps(taken_s).encode())[asker])
    own.close()
    return found


def _compute(seconds: float, keeps_lock: bool) -> None:
    matrix, until = torch.full((192, 192), 1e-3), time.perf_counter() + seconds
    while time.perf_counter() < until:
        if keeps_lock:
            sum(range(1000))
        else:
            matrix @ matrix


def _transfer(window, seconds: float) -> float:
    """Seconds per round of transfers; infinite if what was put is not what is got."""
    values, out, one = torch.rand(COUNT), torch.empty(COUNT), torch.empty(1)
    rounds, start = 0, time.perf_counter()
    while rounds == 0 or time.perf_counter() - start < seconds:
        window.put(values, 0)
        window.get(one, 0)
        window.get(out, 0)
        rounds += 1
    taken_s = (time.perf_counter() - start) / rounds
    return taken_s if torch.equal(out, values) else float("inf")
