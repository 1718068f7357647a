"""The transports of windows across nodes, TCP and RMA, and the self-test that chooses between them.

TCP: requests to the owner's threads (`comm/mpi/tcp.py`); RMA: MPI's one-sided calls (`comm/mpi/rma.py`). Either may be
a hundred times faster, by the network and the MPI library, and its speed matters while the owner computes, not while it
waits inside MPI. So that is measured, once per machine, library and number of nodes.
"""

from __future__ import annotations

import json
import platform
import time
import warnings

import torch

from hpcdist.comm import cache
from hpcdist.errors import UnknownNameError

WAYS = ("tcp", "rma")  # requests to the owner's threads; MPI's one-sided calls
COUNT = 1 << 16  # elements of float32 in a large transfer of the self-test
SPAN_S = 0.1  # how long the owner computes for each way and kind of computation
WORTH = 1.2  # one-sided calls must be faster by this factor: the difference must be more than noise


def choose(comm, wanted: str) -> str:
    """Collective. Return the transport wanted, or for `auto` the faster one: from the cache, or measured.

    Where a rank's death is survived it is `tcp`, whatever is wanted. Rank 0 alone reads and writes the cache.
    """
    if wanted not in (*WAYS, "auto"):
        raise UnknownNameError("internode", wanted, (*WAYS, "auto"))
    if comm.failures.tolerant:
        return "tcp"  # a connection breaks when its peer dies; MPI's one-sided calls may then wait for ever
    if wanted != "auto":
        return wanted
    hosts = len(set(comm.gather(platform.node())))
    path = cache.cache_file("internode", comm.trace.library, len(set(comm.memory.nodes)), hosts)
    kept = comm.gather(_read(path) if comm.rank == 0 else "")[0]
    if kept:
        return kept
    seconds = measure(comm)
    way = "rma" if seconds["rma"] * WORTH < seconds["tcp"] else "tcp"
    if comm.rank == 0:
        cache.keep(path, json.dumps({"way": way, "seconds": seconds}, indent=1))
    return way


def _read(path) -> str:
    """Read the name of a transport from a file; empty if there is none."""
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


def measure(comm) -> dict[str, float]:
    """Collective. Time a small get, a large get and a large put together, by transport; the same on all ranks.

    The owner computes meanwhile: half of the time in torch, which gives up the interpreter lock, half in Python,
    which keeps it. Rank 0 owns the memory, the first rank of another node reads and writes it, the others wait.
    """
    own = comm.split(0)
    asker = next(rank for rank in range(comm.size) if comm.memory.nodes[rank] != comm.memory.nodes[0])
    taken_s = {}
    for way in WAYS:
        window = own.memory.window(COUNT if own.rank == 0 else 0, way=way)
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
    seconds = own.gather(taken_s)[asker]
    own.close()
    return seconds


def _compute(seconds: float, keeps_lock: bool) -> None:
    matrix, until = torch.full((192, 192), 1e-3), time.perf_counter() + seconds
    while time.perf_counter() < until:
        if keeps_lock:
            sum(range(1000))
        else:
            matrix @ matrix


def _transfer(window, seconds: float) -> float:
    """Time a round of transfers, in seconds; infinite if a get does not return the values of the put before."""
    values, out, one = torch.rand(COUNT), torch.empty(COUNT), torch.empty(1)
    rounds, start = 0, time.perf_counter()
    while rounds == 0 or time.perf_counter() - start < seconds:
        window.put(values, 0)
        window.get(one, 0)
        window.get(out, 0)
        rounds += 1
    taken_s = (time.perf_counter() - start) / rounds
    return taken_s if torch.equal(out, values) else float("inf")
