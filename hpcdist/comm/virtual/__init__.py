"""The virtual cluster: N virtual ranks in one process, under a deterministic scheduler with a virtual clock.

`run_virtual(body, size)` calls `body(comm)` on every rank. Runs with the same seed are bitwise identical: results,
virtual times and random numbers. The modules: `clock` (scheduling), `network` (links), `group` (messages, which are
buffered, and formulas of collective calls), `window` (one-sided access), `compute` (step times).
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
COLLECTS_AT = 50_000  # new objects, after which Python collects garbage during a run
_running = threading.Lock()  # one run at a time: random state and the number of threads are process-wide


def run_virtual(
    body: Callable[[VirtualCommunicator], Result], size: int, *, seed: int = 0, network: Network | None = None,
    compute: ComputeModel | None = None,
) -> list[Result]:  # fmt: skip
    """Run `body(comm)` on `size` virtual ranks; return their results in rank order.

    Each rank is a thread, and one thread runs at a time: the rank with the smallest virtual time; among several, the
    one that has been ready the longest. Each rank has a separate random state (torch, numpy, `random`), seeded by
    (seed, rank); torch computes with one thread. The caller's random state and thread count are restored at the end.

    Args:
        seed: random seed, at least 0.
        network: latency and bandwidth of links; None: transfers take no time, one rank per node.
        compute: model of the time that `comm.compute()` takes; None: no time.

    Raises:
        ConfigError: an argument breaks its rule.
        DeadlockError: no rank can continue; the message says what each rank waits for, since when and at which line.
        The first exception that `body` raises on any rank, with a note that names the rank. This, or Ctrl-C, ends the
        other ranks at their next call of the communicator; their `finally` blocks run.
    """
    require(isinstance(size, Integral) and size >= 1, "size", "an integer of at least 1", size)
    require(isinstance(seed, Integral) and seed >= 0, "seed", "an integer of at least 0", seed)
    require(network is None or isinstance(network, Network), "network", "a Network or None", network)
    require(compute is None or isinstance(compute, ComputeModel), "compute", "a compute model or None", compute)
    compute = Constant(0.0) if compute is None else compute
    compute.check(size)
    if not _running.acquire(blocking=False):
        raise CommunicationError(
            f"run_virtual must not be called during another run in this process; got a call in thread "
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
