"""Joining the ranks: init, who am I, broadcast, and checking that all ranks agree."""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import hpcdist
from hpcdist.comm.communicator import Communicator
from hpcdist.comm.launch import FINALIZE_ALONE, check_world, tolerates_deaths
from hpcdist.config import differences
from hpcdist.errors import ConfigError, MismatchError
from hpcdist.faults import excepthook


class Session:
    """What `init` set up, and the distributed optimiser that `shard`'s loaders serve."""

    comm: Communicator | None = None
    optimizer: Any = None
    watchdog: Any = None


class _ThreadSession(Session, threading.local):
    """A session of one thread, where `init` was given a communicator: a virtual rank is a thread."""


_process, _thread = Session(), _ThreadSession()


def current() -> Session:
    """The session of this thread, or else of the process. Raises ConfigError before `init`."""
    session = _thread if _thread.comm is not None else _process
    if session.comm is None:
        raise ConfigError("hpcdist.init() must be called before this; got no session. Call it first thing in main.")
    return session


def init(
    *,
    comm: Communicator | None = None,
    deadline_s: float | None = None,
    gpu_aware_mpi: bool | None = None,
    across: str | None = None,
) -> Communicator:
    """Collective. Joins the ranks that mpirun or srun started (one rank without them); safe to call again.

    From here on an exception that nobody catches ends every rank, and a blocking call past the deadline ends the job
    with a message that names the missing rank.

    Args:
        comm: ranks to use instead, e.g. virtual ones; then for the calling thread only.
        deadline_s: seconds that a blocking call may take; 600 by default.
        gpu_aware_mpi: whether MPI is given device memory itself; by default messages from and to a GPU go through
            pinned host memory, for sites warn that such an MPI beside NCCL can deadlock.
        across: how windows reach other nodes: `tcp`, `rma` (MPI's one-sided calls), or by default `auto`, the one that
            is measured to be faster. TCP uses the fastest network that hosts share; `tcp:ib0` and `auto:10.1.0.0/16`
            name its interface or network instead.

    Raises:
        ConfigError: gpu_aware_mpi without a CUDA device, or where MPI was built without CUDA.
        WorldError: the launcher started more ranks than MPI found.
        MismatchError: ranks run different versions of hpcdist, torch or Python, or differ in gpu_aware_mpi.
    """
    if comm is not None:
        _thread.comm = comm
    elif _process.comm is None:
        _process.comm = _join_world(deadline_s, gpu_aware_mpi)
    session = current()
    if deadline_s is not None:
        session.comm.deadline_s = deadline_s
    if across is not None:
        session.comm.across = across
    if gpu_aware_mpi is not None:
        _give_device_memory(session.comm, gpu_aware_mpi)
    return session.comm


def _join_world(deadline_s: float | None, gpu_aware_mpi: bool | None) -> Communicator:
    tolerant = tolerates_deaths(os.environ)  # reading the launcher's variables, no setting
    if tolerant:
        os.environ.update(FINALIZE_ALONE)  # before MPI starts, which reads it then
    from hpcdist.comm import mpi  # starts MPI: not at import, so that `import hpcdist` works without it
    from hpcdist.comm.mpi_watchdog import Watchdog

    comm = mpi.world(tolerant=tolerant, **({} if deadline_s is None else {"deadline_s": deadline_s}))
    check_world(comm.size, mpi.library(), os.environ)
    if comm.size > 1:
        excepthook.install(comm.rank, comm.abort)
    versions = {"hpcdist": hpcdist.__version__, "torch": torch.__version__, "mpi": mpi.library()}
    versions["python"] = ".".join(platform.python_version_tuple()[:2])
    require_equal(comm, versions | {"gpu_aware_mpi": gpu_aware_mpi}, "versions and settings")
    _process.watchdog = Watchdog(comm)
    return comm


def _give_device_memory(comm: Communicator, wanted: bool) -> None:
    """Collective. Makes `comm`, and what is split from it from here on, give device memory to MPI, or stage it."""
    require_equal(comm, {"gpu_aware_mpi": wanted}, "gpu_aware_mpi")
    for rank, reason in enumerate(comm.exchange(_obstacle(comm).encode()) if wanted else ()):
        if reason:
            raise ConfigError(
                f"gpu_aware_mpi must be false where MPI can't read the memory of a GPU; got true, and on rank {rank} "
                f"{reason.decode()}. Leave it out: messages then go through pinned host memory."
            )
    if comm.mpi is not None:
        comm.staging.device_aware = wanted


def _obstacle(comm: Communicator) -> str:
    """Why this rank can't give device memory to MPI; empty where it can."""
    if comm.mpi is None:
        return "there is no MPI: the ranks are virtual"
    from hpcdist.comm import mpi_device

    return mpi_device.obstacle()


def joined() -> Communicator | None:
    """The ranks this process has joined; None before `init`."""
    return _process.comm


def leave() -> None:
    """Collective. Ends the session: all ranks end alike from here on, and none has to end the others."""
    _process.comm = None


def rank() -> int:
    """This process's rank, 0 to size() − 1."""
    return current().comm.rank


def size() -> int:
    """The number of ranks."""
    return current().comm.size


def local_rank() -> int:
    """The number of this rank among those of its node: the GPU to use where each rank has one."""
    comm = current().comm
    return sum(node == comm.nodes[comm.rank] for node in comm.nodes[: comm.rank])


def broadcast(value: Any, root: int = 0) -> Any:
    """Collective. Makes every rank's `value` root's, and returns it.

    A tensor, a module (parameters and buffers) or a list or dict of tensors is overwritten in place; anything that
    JSON can hold (numbers, strings, lists, dicts) is returned anew.
    """
    comm = current().comm
    tensors = _tensors(value)
    if tensors is None:
        data = json.dumps(value).encode() if comm.rank == root else b""
        return json.loads(comm.exchange(data)[root])
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1)
        comm.broadcast(flat, root)
        tensor.detach().copy_(flat.view(tensor.shape))
    return value


def _tensors(value: Any) -> list[Tensor] | None:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    items = list(value.values()) if isinstance(value, Mapping) else value
    if isinstance(items, (list, tuple)) and items and all(isinstance(item, Tensor) for item in items):
        return list(items)
    return None


def require_equal(comm: Communicator, mine: Mapping[str, Any], what: str) -> None:
    """Collective. Raises MismatchError, naming the first rank and the keys, unless all ranks' `mine` are equal."""
    told = [json.loads(data) for data in comm.exchange(json.dumps(mine, sort_keys=True, default=str).encode())]
    for other, theirs in enumerate(told):
        if theirs != told[0]:
            raise MismatchError(
                f"{what} must be the same on every rank; rank {other} differs from rank 0: "
                f"{'; '.join(differences(told[0], theirs))}. Start every rank from the same files and options."
            )
