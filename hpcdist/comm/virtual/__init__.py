"""The virtual cluster: N virtual ranks in one process, under a deterministic scheduler with a virtual clock.

`run_virtual(body, size)` calls `body(comm)` on every rank. The same seed gives the same run, to the bit: results,
virtual times and random numbers. The modules here define the passing of time: `clock` (who runs when), `network`
(links), `group` (messages: sending is buffered), `collectives` (formulas), `window` (one-sided access), `thread` (a
second thread of a rank), `compute` (step times).
"""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable
from numbers import Integral
from typing import TypeVar

import torch

from hpcdist.comm.virtual.communicator import VirtualCommunicator
from hpcdist.comm.virtual.compute import (
    ComputeModel,
    Constant,
    Exponential,
    Jitter,
    Replay,
    SlowSteps,
    Straggler,
    require,
)
from hpcdist.comm.virtual.group import Cluster, Group
from hpcdist.comm.virtual.network import Network
from hpcdist.comm.virtual.random import callers_state_kept
from hpcdist.errors import CommunicationError

__all__ = [
    "ComputeModel", "Constant", "Exponential", "Jitter", "Network", "Replay", "SlowSteps", "Straggler",
    "VirtualCommunicator", "run_virtual",
]  # fmt: skip
Result = TypeVar("Result")
COLLECTS_AT = 50_000  # new objects
_running = threading.Lock()  # random state and the number of threads belong to the process: one run at a time


def run_virtual(
    body: Callable[[VirtualCommunicator], Result],
    size: int,
    *,
    seed: int = 0,
    network: Network | None = None,
    compute: ComputeModel | None = None,
) -> list[Result]:
    """Run `body(comm)` on `size` virtual ranks; return their results in rank order.

    Every rank has a thread, of which one runs at a time: always the rank with the smallest virtual time, and of
    several the one that has been ready for longest. Each begins with a random state of its own (torch, numpy,
    `random`) that depends on (seed, rank); torch computes with one thread. Both are the caller's again at the end.

    Args:
        seed: 0 or more.
        network: the links' latency and bandwidth; None: transfers take no time, every rank is on a node of its own.
        compute: how long `comm.compute()` takes; None: no time.

    Raises:
        ConfigError: an argument breaks its rule.
        DeadlockError: no rank can go on; says what each waits for, since when and at which line.
        Whatever `body` raises first on any rank, with a note that names the rank. The other ranks are ended (their
        `finally` blocks run), and so they are on Ctrl-C, each at its next call of the communicator.
    """
    require(isinstance(size, Integral) and size >= 1, "size", "an integer of at least 1", size)
    require(isinstance(seed, Integral) and seed >= 0, "seed", "an integer of at least 0", seed)
    require(network is None or isinstance(network, Network), "network", "a Network or None", network)
    require(compute is None or isinstance(compute, ComputeModel), "compute", "a compute model or None", compute)
    compute = Constant(0.0) if compute is None else compute
    compute.check(size)
    if not _running.acquire(blocking=False):
        raise CommunicationError(
            f"run_virtual must not be called while another run is under way in this process; got a call in thread "
            f"{threading.current_thread().name!r}. Give the outer run more ranks, or split its communicator."
        )
    n_threads, collects_at = torch.get_num_threads(), gc.get_threshold()
    try:
        if collects_at[0]:  # else the collector goes through the objects of all ranks again and again
            gc.set_threshold(max(collects_at[0], COLLECTS_AT), *collects_at[1:])
        with callers_state_kept():
            torch.set_num_threads(1)
            cluster = Cluster(size, seed, Network(0.0, math.inf) if network is None else network, compute)
            group = Group(cluster, list(range(size)))
            return cluster.clock.run(lambda rank: body(VirtualCommunicator(group, rank)))
    finally:
        torch.set_num_threads(n_threads)
        gc.set_threshold(*collects_at)
        _running.release()
